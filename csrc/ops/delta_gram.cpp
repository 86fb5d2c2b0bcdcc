#include "cpu/delta_gram.h"

#include <cstring>

#include "ops/tensors.h"
#include "ops/threads.h"

namespace fedkernels {

static Tensor delta_gram_cpu(std::vector<Tensor> global_params, std::vector<Tensor> client_params) {
  const ParameterLists lists(global_params, client_params, array_of);
  const std::vector<Piece> pieces = pieces_of(lists, 1 << 14);
  const int64_t clients = lists.clients;
  const int64_t padded = delta_gram_padded(clients);

  // Each slot sums its share of the pieces; the slots are then added in order. So the result does not depend on the
  // number of threads. Fewer slots where the matrix is large.
  const int64_t room = padded * padded, most = std::clamp<int64_t>((1 << 22) / room, 4, 64);
  const int64_t slots = std::clamp<int64_t>(pieces.size() / 2, 1, most);
  std::vector<double> memory(slots * room);
  const auto kernel = FEDKERNELS_BEST(delta_gram);
  const int64_t workers = std::min<int64_t>(slots, torch_threads().workers);
  const int64_t each = (delta_gram_workspace(padded) * sizeof(double) + 63) / 64 * 64;
  const auto workspace = kernel_memory(workers * each);
  std::memset(workspace.get(), 0, workers * each);
  for_each_task(slots, workers, [&](int64_t slot, int64_t worker) {
    const size_t last = pieces.size() * (slot + 1) / slots;
    for (size_t i = pieces.size() * slot / slots; i < last; ++i) {
      const Piece& piece = pieces[i];
      kernel(lists.of(piece.tensor), clients, piece.start, piece.count,
             reinterpret_cast<double*>(workspace.get() + worker * each), memory.data() + slot * room);
    }
  });

  Tensor result = torch::stable::empty({clients, clients}, ScalarType::Double);
  double* gram = static_cast<double*>(result.data_ptr());
  for (int64_t i = 0; i < clients; ++i) {
    for (int64_t j = i; j < clients; ++j) {
      double total = 0;
      for (int64_t slot = 0; slot < slots; ++slot) total += memory[slot * room + i * padded + j];
      gram[i * clients + j] = gram[j * clients + i] = total;
    }
  }
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("delta_gram", TORCH_BOX(&delta_gram_cpu)); }

}  // namespace fedkernels

#include "cpu/apply_deltas.h"

#include "ops/tensors.h"
#include "ops/threads.h"

namespace fedkernels {

static void apply_deltas_cpu(std::vector<Tensor> global_params, std::vector<Tensor> client_params, Tensor weights) {
  const ParameterLists lists(global_params, client_params, array_of);
  STD_TORCH_CHECK(weights.is_cpu() && weights.is_contiguous() && weights.scalar_type() == ScalarType::Double &&
                      weights.numel() == lists.clients,
                  "weights must be float64 [K] on the CPU");
  const double* weight = static_cast<const double*>(weights.data_ptr());
  const std::vector<Piece> pieces = pieces_of(lists, 1 << 16);
  const auto kernel = FEDKERNELS_BEST(apply_deltas);
  const int64_t count = pieces.size(), workers = std::min<int64_t>((count + 1) / 2, torch_threads().workers);
  for_each_task(count, workers, [&](int64_t i, int64_t) {
    kernel(lists.of(pieces[i].tensor), weight, lists.clients, pieces[i].start, pieces[i].count);
  });
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("apply_deltas", TORCH_BOX(&apply_deltas_cpu)); }

}  // namespace fedkernels

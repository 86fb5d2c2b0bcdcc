#include "cuda/delta_gram.h"

#include "ops/cuda.h"

namespace fedkernels {

static Tensor delta_gram_cuda(std::vector<Tensor> global_params, std::vector<Tensor> client_params) {
  const ParameterLists lists = cuda_parameter_lists(global_params, client_params);
  const OnDevice device(global_params[0]);
  const int64_t tensors = global_params.size();
  const Tensor words = memory_on(global_params[0], {cuda_delta_gram_words(tensors, lists.clients)}, ScalarType::Long);
  Tensor gram = memory_on(global_params[0], {lists.clients, lists.clients}, ScalarType::Double);
  check_cuda(cuda_delta_gram(lists.arrays.data(), lists.sizes.data(), tensors, lists.clients,
                             static_cast<int64_t*>(words.data_ptr()), static_cast<double*>(gram.data_ptr()),
                             device.stream()));
  return gram;
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("delta_gram", TORCH_BOX(&delta_gram_cuda)); }

}  // namespace fedkernels

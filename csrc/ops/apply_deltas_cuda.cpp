#include "cuda/apply_deltas.h"

#include "ops/cuda.h"

namespace fedkernels {

static void apply_deltas_cuda(std::vector<Tensor> global_params, std::vector<Tensor> client_params, Tensor weights) {
  const ParameterLists lists = cuda_parameter_lists(global_params, client_params);
  const bool on_host = weights.is_cpu();
  STD_TORCH_CHECK(weights.is_contiguous() && weights.scalar_type() == ScalarType::Double &&
                      weights.numel() == lists.clients &&
                      (on_host || weights.get_device_index() == global_params[0].get_device_index()),
                  "weights must be float64 [K], on the CPU or on the device of global_params");
  const OnDevice device(global_params[0]);
  const int64_t tensors = global_params.size();
  const double* const weight = static_cast<const double*>(weights.data_ptr());
  const Tensor words =
      memory_on(global_params[0], {cuda::words_of_lists(tensors, lists.clients)}, ScalarType::Long);
  check_cuda(cuda_apply_deltas(lists.arrays.data(), lists.sizes.data(), tensors, lists.clients,
                               on_host ? weight : nullptr, on_host ? nullptr : weight,
                               static_cast<int64_t*>(words.data_ptr()), device.stream()));
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("apply_deltas", TORCH_BOX(&apply_deltas_cuda)); }

}  // namespace fedkernels

#include "cuda/client_weights.h"

#include "ops/client_weights.h"
#include "ops/cuda.h"

namespace fedkernels {

static Tensor client_weights_cuda(Tensor gram, double tol) {
  const GramShapes shapes(gram);
  const int64_t clients = shapes.clients, problems = shapes.problems;
  STD_TORCH_CHECK(clients <= cuda::WEIGHTS_LIMIT, "gram must have K <= ", cuda::WEIGHTS_LIMIT, " on CUDA");
  const OnDevice device(gram);
  const Array grams = cuda_array_of(gram, "gram", gram.get_device_index());
  const bool wide = grams.dtype == DType::f64;
  Tensor result = memory_on(gram, shapes.weights, result_dtype(wide));
  const Array weights = {result.data_ptr(), wide ? DType::f64 : DType::f32};
  const Tensor words = memory_on(gram, {cuda_client_weights_words(problems, clients)}, ScalarType::Double);
  check_cuda(cuda_client_weights(&grams, problems, clients, tol, static_cast<double*>(words.data_ptr()), &weights,
                                 device.stream()));
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("client_weights", TORCH_BOX(&client_weights_cuda)); }

}  // namespace fedkernels

#include "cpu/client_weights.h"

#include <memory>

#include "ops/client_weights.h"

namespace fedkernels {

static Tensor client_weights_cpu(Tensor gram, double tol) {
  const GramShapes shapes(gram);
  const int64_t clients = shapes.clients, problems = shapes.problems;
  const Array grams = array_of(gram, "gram");
  const bool wide = grams.dtype == DType::f64;
  Tensor result = torch::stable::empty(shapes.weights, result_dtype(wide));
  void* const out = result.data_ptr();

  const auto kernel = FEDKERNELS_BEST(client_weights);
  torch::stable::parallel_for(0, problems, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> memory(new double[weights_workspace(clients) + clients]);
    double* const weights = memory.get() + weights_workspace(clients);
    for (int64_t p = begin; p < end; ++p) {
      kernel(grams, p * clients * clients, clients, tol, memory.get(), weights);
      for (int64_t k = 0; k < clients; ++k) {
        if (wide) {
          static_cast<double*>(out)[p * clients + k] = weights[k];
        } else {
          static_cast<float*>(out)[p * clients + k] = static_cast<float>(weights[k]);
        }
      }
    }
  });
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("client_weights", TORCH_BOX(&client_weights_cpu)); }

}  // namespace fedkernels

#include "cuda/unbalanced_ot.h"

#include <algorithm>
#include <string>

#include "ops/cuda.h"
#include "ops/unbalanced_ot.h"

namespace fedkernels {

static Solutions unbalanced_ot_cuda(Tensor cost, Tensor a, Tensor b, double tau_a, double tau_b, double tol,
                                    int64_t max_iterations, std::string method) {
  const TransportShapes shapes(cost, a, b);
  STD_TORCH_CHECK(std::max(shapes.rows, shapes.columns) <= cuda::TRANSPORT_LIMIT,
                  "cost must have at most 2^24 rows and columns on CUDA");
  STD_TORCH_CHECK(method == "accelerated" || method == "steepest", "method must be accelerated or steepest on CUDA");
  const OnDevice device(cost);
  const int32_t index = cost.get_device_index();
  const DType dtype = dtype_of(cost, "cost");
  // The kernels read float32 and float64; the cost of a half is a small part of a solve.
  const bool half = dtype == DType::bf16 || dtype == DType::f16;
  const Tensor matrix = half ? torch::stable::to(cost, ScalarType::Float) : cost;
  const Array costs = cuda_array_of(matrix, "cost", index);
  const Array masses_a = cuda_array_of(a, "a", index), masses_b = cuda_array_of(b, "b", index);
  const bool wide = costs.dtype == DType::f64 || masses_a.dtype == DType::f64 || masses_b.dtype == DType::f64;

  Tensor plan = memory_on(cost, shapes.of_plan, result_dtype(wide));
  Tensor u = memory_on(cost, shapes.of_rows, ScalarType::Double);
  Tensor v = memory_on(cost, shapes.of_columns, ScalarType::Double);
  Tensor value = memory_on(cost, shapes.batch, ScalarType::Double);
  Tensor mass = memory_on(cost, shapes.batch, ScalarType::Double);
  Tensor gap = memory_on(cost, shapes.batch, ScalarType::Double);
  Tensor iterations = memory_on(cost, shapes.batch, ScalarType::Long);
  const auto numbers = [](const Tensor& tensor) { return static_cast<double*>(tensor.data_ptr()); };
  const cuda::Transport transport = {costs,
                                     masses_a,
                                     masses_b,
                                     shapes.problems,
                                     shapes.rows,
                                     shapes.columns,
                                     tau_a,
                                     tau_b,
                                     tol,
                                     max_iterations,
                                     method == "accelerated",
                                     {plan.data_ptr(), wide ? DType::f64 : DType::f32},
                                     numbers(u),
                                     numbers(v),
                                     numbers(value),
                                     numbers(mass),
                                     numbers(gap),
                                     static_cast<int64_t*>(iterations.data_ptr())};
  const Tensor words = memory_on(cost, {cuda_unbalanced_ot_words(&transport)}, ScalarType::Double);
  check_cuda(cuda_unbalanced_ot(&transport, numbers(words), device.stream()));
  return {plan, u, v, value, mass, iterations, gap};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("unbalanced_ot", TORCH_BOX(&unbalanced_ot_cuda)); }

}  // namespace fedkernels

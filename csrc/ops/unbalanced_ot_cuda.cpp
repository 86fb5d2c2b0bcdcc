#include "cuda/unbalanced_ot.h"

#include <string>
#include <tuple>

#include "ops/cuda.h"

namespace fedkernels {

// As in ops/unbalanced_ot.cpp.
using Solutions = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

static Solutions unbalanced_ot_cuda(Tensor cost, Tensor a, Tensor b, double tau_a, double tau_b, double tol,
                                    int64_t max_iterations, std::string method) {
  const int64_t ndim = cost.dim();
  STD_TORCH_CHECK(ndim >= 2 && a.dim() == ndim - 1 && b.dim() == ndim - 1, "cost must have shape [..., M, N]");
  const int64_t rows = cost.size(ndim - 2), columns = cost.size(ndim - 1);
  STD_TORCH_CHECK(rows > 0 && columns > 0, "cost must not be empty in M or N");
  const std::vector<int64_t> batch(cost.sizes().begin(), cost.sizes().end() - 2);
  const int64_t problems = cost.numel() / rows / columns;
  STD_TORCH_CHECK(a.numel() == problems * rows && b.numel() == problems * columns,
                  "a and b must have shapes [..., M] and [..., N]");
  const OnDevice device(cost);
  const int32_t index = cost.get_device_index();
  const DType dtype = dtype_of(cost, "cost");
  // The kernels read float32 and float64; the cost of a half is a small part of a solve.
  const bool half = dtype == DType::bf16 || dtype == DType::f16;
  const Tensor matrix = half ? torch::stable::to(cost, ScalarType::Float) : cost;
  const Array costs = cuda_array_of(matrix, "cost", index);
  const Array masses_a = cuda_array_of(a, "a", index), masses_b = cuda_array_of(b, "b", index);
  const bool wide = costs.dtype == DType::f64 || masses_a.dtype == DType::f64 || masses_b.dtype == DType::f64;

  std::vector<int64_t> of_rows = batch, of_columns = batch;
  const std::vector<int64_t> shape(cost.sizes().begin(), cost.sizes().end());
  of_rows.push_back(rows);
  of_columns.push_back(columns);
  Tensor plan = memory_on(cost, shape, wide ? ScalarType::Double : ScalarType::Float);
  Tensor u = memory_on(cost, of_rows, ScalarType::Double);
  Tensor v = memory_on(cost, of_columns, ScalarType::Double);
  Tensor value = memory_on(cost, batch, ScalarType::Double);
  Tensor mass = memory_on(cost, batch, ScalarType::Double);
  Tensor gap = memory_on(cost, batch, ScalarType::Double);
  Tensor iterations = memory_on(cost, batch, ScalarType::Long);
  const auto numbers = [](const Tensor& tensor) { return static_cast<double*>(tensor.data_ptr()); };
  const cuda::Transport transport = {costs,
                                     masses_a,
                                     masses_b,
                                     problems,
                                     rows,
                                     columns,
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
  const bool block = cuda::fits_one_block(transport);
  const int64_t count = block ? cuda_unbalanced_ot_block_words(&transport) : cuda_unbalanced_ot_team_words(&transport);
  const Tensor words = memory_on(cost, {count}, ScalarType::Double);
  check_cuda(block ? cuda_unbalanced_ot_block(&transport, numbers(words), device.stream())
                   : cuda_unbalanced_ot_team(&transport, numbers(words), device.stream()));
  return {plan, u, v, value, mass, iterations, gap};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("unbalanced_ot", TORCH_BOX(&unbalanced_ot_cuda)); }

}  // namespace fedkernels

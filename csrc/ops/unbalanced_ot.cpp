#include "cpu/unbalanced_ot.h"

#include <memory>
#include <string>

#include "ops/unbalanced_ot.h"

namespace fedkernels {

static Solutions unbalanced_ot_cpu(Tensor cost, Tensor a, Tensor b, double tau_a, double tau_b, double tol,
                                   int64_t max_iterations, std::string method) {
  const TransportShapes shapes(cost, a, b);
  const int64_t rows = shapes.rows, columns = shapes.columns, problems = shapes.problems;
  STD_TORCH_CHECK(method == "accelerated" || method == "interior_point" || method == "steepest",
                  "method must be accelerated, interior_point or steepest");
  STD_TORCH_CHECK(columns < (int64_t{1} << 31) - TRANSPORT_GROUP, "cost must have fewer than 2^31 - 8 columns");
  const Array costs = array_of(cost, "cost"), masses_a = array_of(a, "a"), masses_b = array_of(b, "b");

  const bool wide = costs.dtype == DType::f64 || masses_a.dtype == DType::f64 || masses_b.dtype == DType::f64;
  Tensor plan = torch::stable::empty(shapes.of_plan, result_dtype(wide));
  Tensor u = torch::stable::empty(shapes.of_rows, ScalarType::Double);
  Tensor v = torch::stable::empty(shapes.of_columns, ScalarType::Double);
  Tensor value = torch::stable::empty(shapes.batch, ScalarType::Double);
  Tensor mass = torch::stable::empty(shapes.batch, ScalarType::Double);
  Tensor gap = torch::stable::empty(shapes.batch, ScalarType::Double);
  Tensor iterations = torch::stable::empty(shapes.batch, ScalarType::Long);
  const Array plans = {plan.data_ptr(), wide ? DType::f64 : DType::f32};
  double *const us = static_cast<double*>(u.data_ptr()), *const vs = static_cast<double*>(v.data_ptr());
  double *const values = static_cast<double*>(value.data_ptr()), *const gaps = static_cast<double*>(gap.data_ptr());
  double* const masses = static_cast<double*>(mass.data_ptr());
  int64_t* const counts = static_cast<int64_t*>(iterations.data_ptr());

  const TransportMethod steps = method == "accelerated"      ? TransportMethod::accelerated
                                : method == "interior_point" ? TransportMethod::interior_point
                                                             : TransportMethod::steepest;
  const auto kernel = FEDKERNELS_BEST(unbalanced_ot);
  torch::stable::parallel_for(0, problems, 1, [&](int64_t begin, int64_t end) {
    size_t size = (transport_workspace(rows, columns) + 8) * sizeof(double);
    const std::unique_ptr<char[]> memory(new char[size]);
    void* workspace = memory.get();
    std::align(64, size - 64, workspace, size);
    for (int64_t p = begin; p < end; ++p) {
      const TransportProblem problem = {costs,   masses_a, masses_b, p * rows * columns, p * rows,       p * columns,
                                        rows,    columns,  tau_a,    tau_b,              tol,            max_iterations,
                                        steps};
      TransportSolution solution = {plans, p * rows * columns, us + p * rows, vs + p * columns, 0, 0, 0, 0};
      kernel(problem, static_cast<double*>(workspace), &solution);
      values[p] = solution.value;
      masses[p] = solution.mass;
      gaps[p] = solution.gap;
      counts[p] = solution.iterations;
    }
  });
  return {plan, u, v, value, mass, iterations, gap};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("unbalanced_ot", TORCH_BOX(&unbalanced_ot_cpu)); }

}  // namespace fedkernels

#include "cpu/nt_xent.h"

#include <string>
#include <tuple>

#include "ops/contrastive.h"

namespace fedkernels {

static NTXentProblem problem_of(const Tensor& view1, const Tensor& view2, double temperature) {
  check_nt_xent(view1, view2);
  const Array first = array_of(view1, "view1"), second = array_of(view2, "view2");
  const bool wide = first.dtype == DType::f64 || second.dtype == DType::f64;
  return {first, second, view1.size(0), view1.size(1), temperature, wide, nullptr, nullptr, nullptr};
}

static Tensor solve(NTXentProblem& problem, const Tensor& gradient) {
  Tensor losses = torch::stable::empty({2 * problem.batch}, result_dtype(problem.wide));
  problem.losses = losses.data_ptr();
  problem.gradient = data_or_null(gradient);
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(nt_xent)(problem, threads, memory);
  });
  return losses;
}

static Tensor gradient_of_both(const NTXentProblem& problem, bool wanted) {
  if (!wanted) return torch::stable::empty({0}, result_dtype(problem.wide));
  return torch::stable::empty({2 * problem.batch, problem.width}, result_dtype(problem.wide));
}

// The gradient is that of the sum of the losses in the rows of both views. It is empty where it is not wanted, and
// where the losses are not reduced: each may be weighted by something else.
static std::tuple<Tensor, Tensor> nt_xent_cpu(Tensor view1, Tensor view2, double temperature, std::string reduction,
                                              bool gradient) {
  NTXentProblem problem = problem_of(view1, view2, temperature);
  Tensor to_rows = gradient_of_both(problem, gradient && reduction != "none");
  const Tensor losses = solve(problem, to_rows);
  return {reduced(losses, reduction), to_rows};
}

static Tensor nt_xent_gradients_cpu(Tensor view1, Tensor view2, double temperature, Tensor weights) {
  NTXentProblem problem = problem_of(view1, view2, temperature);
  problem.weights = weights_of(weights, 2 * problem.batch);
  Tensor to_rows = gradient_of_both(problem, true);
  solve(problem, to_rows);
  return to_rows;
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) {
  m.impl("nt_xent", TORCH_BOX(&nt_xent_cpu));
  m.impl("nt_xent_gradients", TORCH_BOX(&nt_xent_gradients_cpu));
}

}  // namespace fedkernels

#include "cpu/info_nce.h"

#include <string>
#include <tuple>

#include "ops/contrastive.h"

namespace fedkernels {

static InfoNCEProblem problem_of(const Tensor& query, const Tensor& key, double temperature) {
  check_info_nce(query, key);
  const Array of_query = array_of(query, "query"), of_key = array_of(key, "key");
  const bool wide = of_query.dtype == DType::f64 || of_key.dtype == DType::f64;
  return {of_query,    of_key, query.size(0), key.size(0), query.size(1),
          temperature, wide,   nullptr,       nullptr,     nullptr,       nullptr};
}

static Tensor solve(InfoNCEProblem& problem, const Tensor& query_gradient, const Tensor& key_gradient) {
  Tensor losses = torch::stable::empty({problem.queries}, result_dtype(problem.wide));
  problem.losses = losses.data_ptr();
  problem.query_gradient = data_or_null(query_gradient);
  problem.key_gradient = data_or_null(key_gradient);
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(info_nce)(problem, threads, memory);
  });
  return losses;
}

// The gradients are those of the sum of the losses; a gradient that is not wanted is an empty tensor. So are both where
// losses that are not reduced give the keys a gradient: it mixes them, and their weights are not known yet.
static std::tuple<Tensor, Tensor, Tensor> info_nce_cpu(Tensor query, Tensor key, double temperature,
                                                       std::string reduction, bool query_gradient, bool key_gradient) {
  InfoNCEProblem problem = problem_of(query, key, temperature);
  const bool later = reduction == "none" && key_gradient;
  Tensor to_query = gradient_of(query, problem.wide, query_gradient && !later);
  Tensor to_key = gradient_of(key, problem.wide, key_gradient && !later);
  const Tensor losses = solve(problem, to_query, to_key);
  return {reduced(losses, reduction), to_query, to_key};
}

static std::tuple<Tensor, Tensor> info_nce_gradients_cpu(Tensor query, Tensor key, double temperature, Tensor weights,
                                                         bool query_gradient, bool key_gradient) {
  InfoNCEProblem problem = problem_of(query, key, temperature);
  problem.weights = weights_of(weights, problem.queries);
  Tensor to_query = gradient_of(query, problem.wide, query_gradient);
  Tensor to_key = gradient_of(key, problem.wide, key_gradient);
  solve(problem, to_query, to_key);
  return {torch::stable::to(to_query, query.scalar_type()), torch::stable::to(to_key, key.scalar_type())};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) {
  m.impl("info_nce", TORCH_BOX(&info_nce_cpu));
  m.impl("info_nce_gradients", TORCH_BOX(&info_nce_gradients_cpu));
}

}  // namespace fedkernels

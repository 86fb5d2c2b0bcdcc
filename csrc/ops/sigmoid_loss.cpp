#include "cpu/sigmoid_loss.h"

#include <tuple>

#include "ops/contrastive.h"

namespace fedkernels {

// The sum over all pairs and its gradients; one that is not wanted is an empty tensor.
static std::tuple<Tensor, Tensor, Tensor> sigmoid_loss_cpu(Tensor query, Tensor key, bool query_gradient,
                                                           bool key_gradient) {
  STD_TORCH_CHECK(query.dim() == 2 && key.dim() == 2 && query.size(0) == key.size(0) &&
                      query.size(1) == key.size(1) && query.numel() > 0,
                  "query and key must have the same shape [B, d], B > 0 and d > 0");
  SigmoidLossProblem problem{};
  problem.query = array_of(query, "query");
  problem.key = array_of(key, "key");
  problem.batch = query.size(0);
  problem.width = query.size(1);
  problem.wide = problem.query.dtype == DType::f64 || problem.key.dtype == DType::f64;
  Tensor losses = torch::stable::empty({problem.batch}, ScalarType::Double);
  Tensor to_query = gradient_of(query, problem.wide, query_gradient);
  Tensor to_key = gradient_of(key, problem.wide, key_gradient);
  problem.losses = static_cast<double*>(losses.data_ptr());
  problem.query_gradient = data_or_null(to_query);
  problem.key_gradient = data_or_null(to_key);
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(sigmoid_loss)(problem, threads, memory);
  });
  return {reduced(losses, "sum"), to_query, to_key};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("sigmoid_loss", TORCH_BOX(&sigmoid_loss_cpu)); }

}  // namespace fedkernels

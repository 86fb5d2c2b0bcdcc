#include <string>
#include <tuple>

#include "ops/contrastive_cuda.h"

namespace fedkernels {

// -> the losses and the gradient of their sum in the rows of both views, each loss counting what `weights` says; the
// gradient is empty where it is not wanted.
static std::tuple<Tensor, Tensor> solve(const Tensor& view1, const Tensor& view2, double temperature,
                                        const Tensor* weights, bool gradient, bool tf32) {
  check_nt_xent(view1, view2);
  check_contrastive(view1, view2, "view1 and view2");
  const OnDevice device(view1);
  const int64_t batch = view1.size(0), width = view1.size(1), count = 2 * batch;
  const Precision in = precision_of(view1, view2, tf32);
  Tensor rows = memory_on(view1, {count, width}, in.rows);
  Tensor first = torch::stable::narrow(rows, 0, 0, batch), second = torch::stable::narrow(rows, 0, batch, batch);
  torch::stable::copy_(first, view1);
  torch::stable::copy_(second, view2);
  const auto sums_on = [&](const std::vector<int64_t>& shape) { return memory_on(view1, shape, in.sums); };
  Tensor to_rows = sums_on(gradient ? std::vector<int64_t>{count, width} : std::vector<int64_t>{0});
  const Tensor losses = sums_on({count}), largest = sums_on({count}), share = sums_on({count});
  Tensor counts = counts_of(weights, losses, device.stream());

  cuda::ContrastivePass pass = {};
  pass.rows = pass.columns = {rows.data_ptr(), dtype_of(rows, "view1")};
  pass.row_count = pass.column_count = pass.positives = count;
  pass.width = width;
  pass.temperature = temperature;
  pass.shift = batch;
  pass.leave_out_self = true;
  pass.row_largest = data_or_null(largest);
  pass.row_share = data_or_null(share);
  count_by(pass, counts);
  pass.losses = data_or_null(losses);
  run_pass(pass, in.tensor_cores, view1, device.stream());
  if (gradient) {
    pass.given = true;
    pass.column_largest = pass.row_largest;
    pass.column_share = pass.row_share;
    pass.column_weight = pass.row_weight;
    pass.gradient = gradient_array(to_rows);
    run_pass(pass, in.tensor_cores, view1, device.stream());
  }
  return {losses, to_rows};
}

// As on the CPU.
static std::tuple<Tensor, Tensor> nt_xent_cuda(Tensor view1, Tensor view2, double temperature, std::string reduction,
                                               bool gradient, bool tf32) {
  const auto [losses, to_rows] = solve(view1, view2, temperature, nullptr, gradient && reduction != "none", tf32);
  return {reduced_on_cuda(losses, reduction), to_rows};
}

static Tensor nt_xent_gradients_cuda(Tensor view1, Tensor view2, double temperature, Tensor weights,
                                     bool tf32) {
  return std::get<1>(solve(view1, view2, temperature, &weights, true, tf32));
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) {
  m.impl("nt_xent", TORCH_BOX(&nt_xent_cuda));
  m.impl("nt_xent_gradients", TORCH_BOX(&nt_xent_gradients_cuda));
}

}  // namespace fedkernels

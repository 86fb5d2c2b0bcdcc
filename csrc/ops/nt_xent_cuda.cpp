#include <string>
#include <tuple>

#include "ops/contrastive_cuda.h"

namespace fedkernels {

// As on the CPU, but for half precision alone; nt_xent_gradients has no implementation here.
static std::tuple<Tensor, Tensor> nt_xent_cuda(Tensor view1, Tensor view2, double temperature, std::string reduction,
                                               bool gradient) {
  STD_TORCH_CHECK(view1.dim() == 2 && view2.dim() == 2 && view1.size(0) == view2.size(0) &&
                      view1.size(1) == view2.size(1) && view1.size(0) > 0 && view1.size(1) > 0,
                  "view1 and view2 must have one shape [B, d], neither 0");
  check_contrastive(view1, view2, "view1 and view2");
  const OnDevice device(view1);
  const int64_t batch = view1.size(0), width = view1.size(1), count = 2 * batch;
  Tensor rows = memory_on(view1, {count, width}, view1.scalar_type());
  Tensor first = torch::stable::narrow(rows, 0, 0, batch), second = torch::stable::narrow(rows, 0, batch, batch);
  torch::stable::copy_(first, view1);
  torch::stable::copy_(second, view2);
  const bool formed = gradient && reduction != "none";
  Tensor to_rows = floats_on(view1, formed ? std::vector<int64_t>{count, width} : std::vector<int64_t>{0});
  const Tensor losses = floats_on(view1, {count}), largest = floats_on(view1, {count}), share = floats_on(view1, {count});

  cuda::ContrastivePass pass = {};
  pass.rows = pass.columns = {rows.data_ptr(), dtype_of(rows, "view1")};
  pass.row_count = pass.column_count = pass.positives = count;
  pass.width = width;
  pass.temperature = static_cast<float>(temperature);
  pass.shift = batch;
  pass.leave_out_self = true;
  pass.row_largest = floats_of(largest);
  pass.row_share = floats_of(share);
  pass.losses = floats_of(losses);
  run_pass(pass, view1, device.stream());
  if (formed) {
    pass.given = true;
    pass.column_largest = pass.row_largest;
    pass.column_share = pass.row_share;
    pass.gradient = floats_of(to_rows);
    run_pass(pass, view1, device.stream());
  }
  return {reduced_on_cuda(losses, reduction, device.stream()), to_rows};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("nt_xent", TORCH_BOX(&nt_xent_cuda)); }

}  // namespace fedkernels

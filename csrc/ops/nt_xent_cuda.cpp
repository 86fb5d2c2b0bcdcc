#include <string>
#include <tuple>

#include "ops/contrastive_cuda.h"

namespace fedkernels {

// As on the CPU; nt_xent_gradients has no implementation here.
static std::tuple<Tensor, Tensor> nt_xent_cuda(Tensor view1, Tensor view2, double temperature, std::string reduction,
                                               bool gradient) {
  STD_TORCH_CHECK(view1.dim() == 2 && view2.dim() == 2 && view1.size(0) == view2.size(0) &&
                      view1.size(1) == view2.size(1) && view1.size(0) > 0 && view1.size(1) > 0,
                  "view1 and view2 must have one shape [B, d], neither 0");
  check_contrastive(view1, view2, "view1 and view2");
  const OnDevice device(view1);
  const int64_t batch = view1.size(0), width = view1.size(1), count = 2 * batch;
  const ScalarType dtype = contrastive_dtype(view1, view2), of_sums = sums_dtype(dtype);
  Tensor rows = memory_on(view1, {count, width}, dtype);
  Tensor first = torch::stable::narrow(rows, 0, 0, batch), second = torch::stable::narrow(rows, 0, batch, batch);
  torch::stable::copy_(first, view1);
  torch::stable::copy_(second, view2);
  const bool formed = gradient && reduction != "none";
  const auto sums_on = [&](const std::vector<int64_t>& shape) { return memory_on(view1, shape, of_sums); };
  Tensor to_rows = sums_on(formed ? std::vector<int64_t>{count, width} : std::vector<int64_t>{0});
  const Tensor losses = sums_on({count}), largest = sums_on({count}), share = sums_on({count});

  cuda::ContrastivePass pass = {};
  pass.rows = pass.columns = {rows.data_ptr(), dtype_of(rows, "view1")};
  pass.row_count = pass.column_count = pass.positives = count;
  pass.width = width;
  pass.temperature = temperature;
  pass.shift = batch;
  pass.leave_out_self = true;
  pass.row_largest = data_of(largest);
  pass.row_share = data_of(share);
  pass.losses = data_of(losses);
  run_pass(pass, view1, device.stream());
  if (formed) {
    pass.given = true;
    pass.column_largest = pass.row_largest;
    pass.column_share = pass.row_share;
    pass.gradient = data_of(to_rows);
    run_pass(pass, view1, device.stream());
  }
  return {reduced_on_cuda(losses, reduction, device.stream()), to_rows};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("nt_xent", TORCH_BOX(&nt_xent_cuda)); }

}  // namespace fedkernels

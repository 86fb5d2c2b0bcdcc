#include <string>
#include <tuple>

#include "ops/contrastive_cuda.h"

namespace fedkernels {

// -> the losses and the gradients of their sum, each loss counting what `weights` says; a gradient that is not wanted
// is empty. With weights gradients are in the dtypes of the inputs, else in that of the sums.
static std::tuple<Tensor, Tensor, Tensor> solve(const Tensor& query, const Tensor& key, double temperature,
                                                const Tensor* weights, bool query_gradient, bool key_gradient,
                                                bool tf32) {
  check_info_nce(query, key);
  check_contrastive(query, key, "query and key");
  const OnDevice device(query);
  const int64_t queries = query.size(0), keys = key.size(0), width = query.size(1);
  const Precision in = precision_of(query, key, tf32);
  const Tensor rows = query.scalar_type() == in.rows ? query : torch::stable::to(query, in.rows);
  const Tensor columns = key.scalar_type() == in.rows ? key : torch::stable::to(key, in.rows);
  const std::vector<int64_t> none = {0};
  const auto sums_on = [&](const std::vector<int64_t>& shape) { return memory_on(query, shape, in.sums); };
  const auto gradient_on = [&](const Tensor& input, bool wanted) {
    const std::vector<int64_t> shape = {input.size(0), width};
    return memory_on(query, wanted ? shape : none, weights ? input.scalar_type() : in.sums);
  };
  const Tensor to_query = gradient_on(query, query_gradient), to_key = gradient_on(key, key_gradient);
  const Tensor losses = sums_on({queries}), largest = sums_on({queries}), share = sums_on({queries});
  Tensor counts = counts_of(weights, losses, device.stream());

  cuda::ContrastivePass pass = {};
  pass.rows = {rows.data_ptr(), dtype_of(rows, "query")};
  pass.columns = {columns.data_ptr(), dtype_of(columns, "key")};
  pass.row_count = queries;
  pass.column_count = keys;
  pass.width = width;
  pass.temperature = temperature;
  pass.positives = keys;
  pass.row_largest = data_or_null(largest);
  pass.row_share = data_or_null(share);
  count_by(pass, counts);
  pass.losses = data_or_null(losses);
  pass.gradient = gradient_array(to_query);
  run_pass_by_rows(pass, in.tensor_cores, query, device.stream());
  if (key_gradient) {
    std::swap(pass.rows, pass.columns);
    pass.row_count = keys;
    pass.column_count = pass.positives = queries;
    pass.given = true;
    pass.column_largest = pass.row_largest;
    pass.column_share = pass.row_share;
    pass.column_weight = pass.row_weight;
    pass.row_largest = pass.row_share = nullptr;
    pass.row_weight = nullptr;
    pass.losses = nullptr;
    pass.gradient = gradient_array(to_key);
    run_pass_by_rows(pass, in.tensor_cores, query, device.stream());
  }
  return {losses, to_query, to_key};
}

// As on the CPU.
static std::tuple<Tensor, Tensor, Tensor> info_nce_cuda(Tensor query, Tensor key, double temperature,
                                                        std::string reduction, bool query_gradient, bool key_gradient,
                                                        bool tf32) {
  const bool later = reduction == "none" && key_gradient;
  const auto [losses, to_query, to_key] =
      solve(query, key, temperature, nullptr, query_gradient && !later, key_gradient && !later, tf32);
  return {reduced_on_cuda(losses, reduction), to_query, to_key};
}

static std::tuple<Tensor, Tensor> info_nce_gradients_cuda(Tensor query, Tensor key, double temperature, Tensor weights,
                                                          bool query_gradient, bool key_gradient, bool tf32) {
  const auto [losses, to_query, to_key] = solve(query, key, temperature, &weights, query_gradient, key_gradient, tf32);
  return {to_query, to_key};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) {
  m.impl("info_nce", TORCH_BOX(&info_nce_cuda));
  m.impl("info_nce_gradients", TORCH_BOX(&info_nce_gradients_cuda));
}

}  // namespace fedkernels

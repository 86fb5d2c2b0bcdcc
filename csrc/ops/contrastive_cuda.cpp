#include "cuda/contrastive.h"

#include <tuple>

#include "ops/contrastive_checks.h"
#include "ops/cuda.h"

namespace fedkernels {

// The data of a tensor that is empty where it is missing, of `count` entries beside `like`.
template <typename T>
static T* optional_on_cuda(const Tensor& tensor, ScalarType dtype, const Tensor& like, int64_t count) {
  if (tensor.numel() == 0) return nullptr;
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous() && tensor.get_device_index() == like.get_device_index() &&
                      tensor.scalar_type() == dtype && tensor.numel() >= count,
                  "tensors beside products must be contiguous, on its device and long enough, and have the right dtype");
  return static_cast<T*>(tensor.data_ptr());
}

static cuda::ContrastiveTile tile_of(const Tensor& products, int64_t first_row, int64_t first_column,
                                     int64_t all_columns) {
  const Array array = cuda_array_of(products, "products", products.get_device_index());
  STD_TORCH_CHECK(products.dim() == 2 && products.numel() > 0 && first_row >= 0 && first_column >= 0 &&
                      first_column + products.size(1) <= all_columns,
                  "products must be a tile of a matrix");
  STD_TORCH_CHECK(array.dtype == DType::f32 || array.dtype == DType::f64, "products must be float32 or float64");
  cuda::ContrastiveTile tile = {array.data,  array.dtype == DType::f64, products.size(0), products.size(1), first_row,
                                first_column, all_columns, 1, 0, nullptr, nullptr, nullptr, nullptr, false};
  return tile;
}

static cuda::ContrastiveTile tile_with(const Tensor& products, int64_t first_row, int64_t first_column,
                                       int64_t all_columns, double scale, int64_t shift, const Tensor& positives,
                                       const Tensor& row_labels, const Tensor& column_labels, const Tensor& excluded,
                                       bool leave_out_self) {
  cuda::ContrastiveTile tile = tile_of(products, first_row, first_column, all_columns);
  const int64_t rows = first_row + tile.rows;
  tile.scale = scale;
  tile.shift = shift;
  tile.positives = optional_on_cuda<const int64_t>(positives, ScalarType::Long, products, rows);
  tile.row_labels = optional_on_cuda<const int64_t>(row_labels, ScalarType::Long, products, rows);
  tile.column_labels = optional_on_cuda<const int64_t>(column_labels, ScalarType::Long, products, all_columns);
  tile.excluded = optional_on_cuda<const bool>(excluded, ScalarType::Bool, products, rows * all_columns);
  tile.leave_out_self = leave_out_self;
  STD_TORCH_CHECK(!tile.row_labels == !tile.column_labels, "labels must be given for both sides or for none");
  return tile;
}

static void contrastive_sums_cuda(Tensor products, int64_t first_row, int64_t first_column, int64_t all_columns,
                                  double scale, int64_t shift, Tensor positives, Tensor row_labels,
                                  Tensor column_labels, Tensor excluded, bool leave_out_self, Tensor rows,
                                  Tensor columns, Tensor of_positives) {
  const OnDevice device(products);
  const auto tile = tile_with(products, first_row, first_column, all_columns, scale, shift, positives, row_labels,
                              column_labels, excluded, leave_out_self);
  const int64_t last = first_row + tile.rows;
  double* const of_rows = optional_on_cuda<double>(rows, ScalarType::Double, products, last);
  STD_TORCH_CHECK(of_rows, "rows must not be empty");
  check_cuda(cuda_contrastive_sums(&tile, of_rows,
                                   optional_on_cuda<double>(columns, ScalarType::Double, products, all_columns),
                                   optional_on_cuda<double>(of_positives, ScalarType::Double, products, last),
                                   device.stream()));
}

static void contrastive_weights_cuda(Tensor products, int64_t first_row, int64_t first_column, int64_t all_columns,
                                     double scale, int64_t shift, Tensor positives, Tensor row_labels,
                                     Tensor column_labels, Tensor excluded, bool leave_out_self, Tensor rows,
                                     Tensor columns, Tensor row_weights, Tensor column_weights,
                                     Tensor positive_weights, double factor, Tensor weights, Tensor rest) {
  const OnDevice device(products);
  const auto tile = tile_with(products, first_row, first_column, all_columns, scale, shift, positives, row_labels,
                              column_labels, excluded, leave_out_self);
  const int64_t last = first_row + tile.rows;
  const auto doubles = [&](const Tensor& tensor, int64_t count) {
    return optional_on_cuda<const double>(tensor, ScalarType::Double, products, count);
  };
  const cuda::ContrastiveWeights given = {
      doubles(rows, last), doubles(columns, all_columns), doubles(row_weights, last),
      doubles(column_weights, all_columns), doubles(positive_weights, last), factor,
      cuda_array_of(weights, "weights", products.get_device_index()),
      optional_on_cuda<float>(rest, ScalarType::Float, products, last)};
  const bool half = given.weights.dtype == DType::bf16 || given.weights.dtype == DType::f16;
  STD_TORCH_CHECK(weights.numel() == products.numel() && (half || weights.scalar_type() == products.scalar_type()) &&
                      (given.rows || !given.row_weights) && (given.columns || !given.column_weights),
                  "weights must have the products' shape, and their dtype or 16 bits, and belong to sums");
  check_cuda(cuda_contrastive_weights(&tile, &given, device.stream()));
}

static void contrastive_sigmoid_cuda(Tensor products, int64_t first_row, int64_t first_column, int64_t all_columns,
                                     Tensor rows, bool derivatives) {
  const OnDevice device(products);
  const auto tile = tile_of(products, first_row, first_column, all_columns);
  double* const of_rows = optional_on_cuda<double>(rows, ScalarType::Double, products, first_row + tile.rows);
  STD_TORCH_CHECK(of_rows, "rows must not be empty");
  check_cuda(cuda_contrastive_sigmoid(&tile, of_rows, derivatives, device.stream()));
}

// -> the losses [B] and the gradient of their sum in the queries, both float32; without rows where the width does not
// fit the device's shared memory.
static std::tuple<Tensor, Tensor> contrastive_in_one_cuda(Tensor query, Tensor key, double temperature, bool gradient) {
  check_info_nce(query, key);
  const OnDevice device(query);
  cuda::ContrastivePass pass = {};
  pass.rows = cuda_array_of(query, "query", query.get_device_index());
  pass.columns = cuda_array_of(key, "key", query.get_device_index());
  const ScalarType dtype = query.scalar_type();
  STD_TORCH_CHECK(dtype == key.scalar_type() && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) &&
                      cuda_contrastive_fits(query.size(1)) && key.size(0) < (1 << 30),
                  "query and key must be bfloat16 or both float16, of a width that fits the shared memory");
  pass.row_count = query.size(0);
  pass.column_count = key.size(0);
  pass.width = query.size(1);
  pass.temperature = temperature;
  const Tensor losses = memory_on(query, {pass.row_count}, ScalarType::Float);
  const Tensor to_query = memory_on(query, {gradient ? pass.row_count : 0, pass.width}, ScalarType::Float);
  pass.losses = static_cast<float*>(losses.data_ptr());
  pass.gradient = static_cast<float*>(data_or_null(to_query));
  const Tensor memory = memory_on(query, {(cuda_contrastive_memory(&pass) + 3) / 4}, ScalarType::Float);
  check_cuda(cuda_contrastive(&pass, memory.data_ptr(), device.stream()));
  return {losses, to_query};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) {
  m.impl("contrastive_sums", TORCH_BOX(&contrastive_sums_cuda));
  m.impl("contrastive_weights", TORCH_BOX(&contrastive_weights_cuda));
  m.impl("contrastive_sigmoid", TORCH_BOX(&contrastive_sigmoid_cuda));
  m.impl("contrastive_in_one", TORCH_BOX(&contrastive_in_one_cuda));
}

}  // namespace fedkernels

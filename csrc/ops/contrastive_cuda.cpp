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

static cuda::ContrastiveTile tile_of(const Tensor& products, const std::vector<int64_t>& place) {
  const Array array = cuda_array_of(products, "products", products.get_device_index());
  STD_TORCH_CHECK(array.dtype == DType::f32 || array.dtype == DType::f64, "products must be float32 or float64");
  STD_TORCH_CHECK(products.dim() == 2 && products.numel() > 0 && place.size() == 5 && place[0] >= 0 && place[1] >= 0 &&
                      place[1] + products.size(1) <= place[2],
                  "products must be a tile of a matrix");
  cuda::ContrastiveTile tile = {};
  tile.products = array.data;
  tile.wide = array.dtype == DType::f64;
  tile.rows = products.size(0);
  tile.columns = products.size(1);
  tile.first_row = place[0];
  tile.first_column = place[1];
  tile.all_columns = place[2];
  tile.shift = place[3];
  tile.leave_out_self = place[4];
  tile.scale = 1;
  return tile;
}

static cuda::ContrastiveTile tile_with(const Tensor& products, const std::vector<int64_t>& place, double scale,
                                       const std::vector<Tensor>& options) {
  cuda::ContrastiveTile tile = tile_of(products, place);
  const int64_t rows = tile.first_row + tile.rows, columns = tile.all_columns;
  tile.scale = scale;
  STD_TORCH_CHECK(options.size() == 5, "options must be five tensors");
  tile.positives = optional_on_cuda<const int64_t>(options[0], ScalarType::Long, products, rows);
  tile.row_labels = optional_on_cuda<const int64_t>(options[1], ScalarType::Long, products, rows);
  tile.column_labels = optional_on_cuda<const int64_t>(options[2], ScalarType::Long, products, columns);
  tile.excluded = optional_on_cuda<const bool>(options[3], ScalarType::Bool, products, rows * columns);
  tile.factor = optional_on_cuda<const double>(options[4], ScalarType::Double, products, 1);
  STD_TORCH_CHECK(!tile.row_labels == !tile.column_labels, "labels must be given for both sides or for none");
  return tile;
}

static void contrastive_sums_cuda(Tensor products, std::vector<int64_t> place, double scale,
                                  std::vector<Tensor> options, Tensor rows, Tensor columns, Tensor of_positives) {
  const OnDevice device(products);
  const auto tile = tile_with(products, place, scale, options);
  const auto doubles = [&](const Tensor& tensor, int64_t count) {
    return optional_on_cuda<double>(tensor, ScalarType::Double, products, count);
  };
  const int64_t last = tile.first_row + tile.rows;
  STD_TORCH_CHECK(rows.numel() > 0, "rows must not be empty");
  check_cuda(cuda_contrastive_sums(&tile, doubles(rows, last), doubles(columns, tile.all_columns),
                                   doubles(of_positives, last), device.stream()));
}

static void contrastive_weights_cuda(Tensor products, std::vector<int64_t> place, double scale,
                                     std::vector<Tensor> options, std::vector<Tensor> given, double factor,
                                     Tensor weights, Tensor rest) {
  const OnDevice device(products);
  const auto tile = tile_with(products, place, scale, options);
  const int64_t last = tile.first_row + tile.rows;
  STD_TORCH_CHECK(given.size() == 5, "given must be five tensors");
  const auto doubles = [&](int index, int64_t count) {
    return optional_on_cuda<const double>(given[index], ScalarType::Double, products, count);
  };
  const cuda::ContrastiveWeights of_tile = {
      doubles(0, last), doubles(1, tile.all_columns), doubles(2, last), doubles(3, tile.all_columns), doubles(4, last),
      factor, cuda_array_of(weights, "weights", products.get_device_index()),
      optional_on_cuda<float>(rest, ScalarType::Float, products, last)};
  const bool half = of_tile.weights.dtype == DType::bf16 || of_tile.weights.dtype == DType::f16;
  STD_TORCH_CHECK(weights.numel() == products.numel() && (half || weights.scalar_type() == products.scalar_type()) &&
                      (of_tile.rows || !of_tile.row_weights) && (of_tile.columns || !of_tile.column_weights),
                  "weights must have the products' shape, and their dtype or 16 bits, and belong to sums");
  check_cuda(cuda_contrastive_weights(&tile, &of_tile, device.stream()));
}

static void contrastive_sigmoid_cuda(Tensor products, std::vector<int64_t> place, Tensor rows, bool derivatives) {
  const OnDevice device(products);
  const auto tile = tile_of(products, place);
  STD_TORCH_CHECK(rows.numel() > 0, "rows must not be empty");
  double* const sums = optional_on_cuda<double>(rows, ScalarType::Double, products, tile.first_row + tile.rows);
  check_cuda(cuda_contrastive_sigmoid(&tile, sums, derivatives, device.stream()));
}

// -> the losses [B] and the gradient of their sum in the queries, both float32.
static std::tuple<Tensor, Tensor> contrastive_in_one_cuda(Tensor query, Tensor key, double temperature, bool gradient) {
  check_info_nce(query, key);
  const OnDevice device(query);
  cuda::ContrastivePass pass = {};
  pass.rows = cuda_array_of(query, "query", query.get_device_index());
  pass.columns = cuda_array_of(key, "key", query.get_device_index());
  const ScalarType dtype = query.scalar_type();
  STD_TORCH_CHECK(dtype == key.scalar_type() && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) &&
                      key.size(0) < (1 << 30) && reinterpret_cast<uintptr_t>(pass.rows.data) % 16 == 0 &&
                      reinterpret_cast<uintptr_t>(pass.columns.data) % 16 == 0,
                  "query and key must be bfloat16 or both float16, from multiples of 16 bytes on");
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

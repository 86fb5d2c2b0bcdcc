#include "cuda/contrastive.h"

#include <array>
#include <optional>
#include <tuple>

#include "ops/contrastive_checks.h"
#include "ops/cuda.h"
#include "ops/products.h"

namespace fedkernels {

// In lists a missing tensor is one without entries.
using MaybeTensor = std::optional<Tensor>;

static bool is_there(const MaybeTensor& tensor) { return tensor && tensor->numel() > 0; }

// The data of a tensor that may be missing, of `count` entries beside `like`.
template <typename T>
static T* optional_on_cuda(const MaybeTensor& tensor, ScalarType dtype, const Tensor& like, int64_t count) {
  if (!is_there(tensor)) return nullptr;
  STD_TORCH_CHECK(tensor->is_cuda() && tensor->is_contiguous() &&
                      tensor->get_device_index() == like.get_device_index() && tensor->scalar_type() == dtype &&
                      tensor->numel() >= count,
                  "tensors beside products must be contiguous, on its device and long enough, and have the right dtype");
  return static_cast<T*>(tensor->data_ptr());
}

// An array that is null where the tensor is missing, on the device of `like`.
static Array optional_array(const MaybeTensor& tensor, const char* name, const Tensor& like) {
  if (!is_there(tensor)) return {};
  return cuda_array_of(*tensor, name, like.get_device_index());
}

static bool is_16_bits(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

// Once there are weights, they are in the products' place and `read` is false.
template <class Options>
static cuda::ContrastiveTile tile_of(const Tensor& products, const std::vector<int64_t>& place, double scale,
                                     const Options& options, bool read = true) {
  const Array array = cuda_array_of(products, "products", products.get_device_index());
  STD_TORCH_CHECK(!read || !is_16_bits(array.dtype), "products must be float32 or float64");
  STD_TORCH_CHECK(products.dim() == 2 && products.numel() > 0 && place.size() == 6 && place[0] >= 0 && place[1] >= 0 &&
                      place[1] + products.size(1) <= place[2],
                  "products must be a tile of a matrix");
  STD_TORCH_CHECK(options.size() == 6, "options must be six tensors");
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
  tile.divides = place[5];
  tile.scale = scale;
  const int64_t rows = tile.first_row + tile.rows, columns = tile.all_columns;
  tile.positives = optional_on_cuda<const int64_t>(options[0], ScalarType::Long, products, rows);
  tile.row_labels = optional_on_cuda<const int64_t>(options[1], ScalarType::Long, products, rows);
  tile.column_labels = optional_on_cuda<const int64_t>(options[2], ScalarType::Long, products, columns);
  tile.excluded = optional_on_cuda<const bool>(options[3], ScalarType::Bool, products, rows * columns);
  tile.factor = optional_array(options[4], "the factor", products);
  tile.classes = optional_on_cuda<const int64_t>(options[5], ScalarType::Long, products, columns);
  STD_TORCH_CHECK(!tile.row_labels == !tile.column_labels, "labels must be given for both sides or for none");
  STD_TORCH_CHECK(!tile.classes || (tile.columns == columns && tile.rows == columns),
                  "classes need a tile of all pairs of the same rows");
  return tile;
}

// Where the weights of a tile go.
static Array weights_array(const Tensor& weights, const Tensor& products) {
  const Array array = cuda_array_of(weights, "weights", products.get_device_index());
  STD_TORCH_CHECK(weights.numel() == products.numel() &&
                      (is_16_bits(array.dtype) || weights.scalar_type() == products.scalar_type()),
                  "weights must have the products' shape, and their dtype or 16 bits");
  return array;
}

static void contrastive_sums_cuda(Tensor products, std::vector<int64_t> place, double scale,
                                  std::vector<Tensor> options, Tensor rows, Tensor columns, Tensor of_positives,
                                  Tensor counted) {
  const OnDevice device(products);
  const auto tile = tile_of(products, place, scale, options);
  const auto doubles = [&](const Tensor& tensor, int64_t count) {
    return optional_on_cuda<double>(tensor, ScalarType::Double, products, count);
  };
  const int64_t last = tile.first_row + tile.rows;
  STD_TORCH_CHECK(rows.numel() > 0, "rows must not be empty");
  check_cuda(cuda_contrastive_sums(&tile, doubles(rows, last), doubles(columns, tile.all_columns),
                                   doubles(of_positives, last), doubles(counted, last), device.stream()));
}

static void contrastive_weights_cuda(Tensor products, std::vector<int64_t> place, double scale,
                                     std::vector<Tensor> options, std::vector<Tensor> given,
                                     std::vector<double> constants, double factor, Tensor weights, Tensor rest) {
  const OnDevice device(products);
  const auto tile = tile_of(products, place, scale, options);
  const int64_t last = tile.first_row + tile.rows;
  STD_TORCH_CHECK(given.size() == 5 && constants.size() == 3, "given must be five tensors, constants three numbers");
  const auto doubles = [&](int index, int64_t count) {
    return optional_on_cuda<const double>(given[index], ScalarType::Double, products, count);
  };
  const cuda::ContrastiveWeights of_tile = {
      doubles(0, last), doubles(1, tile.all_columns), doubles(2, last), doubles(3, tile.all_columns), doubles(4, last),
      {constants[0], constants[1], constants[2]}, factor, weights_array(weights, products),
      optional_on_cuda<float>(rest, ScalarType::Float, products, last), nullptr};
  STD_TORCH_CHECK((of_tile.rows || !(of_tile.row_weights || constants[0])) &&
                      (of_tile.columns || !(of_tile.column_weights || constants[1])),
                  "weights must belong to sums");
  check_cuda(cuda_contrastive_weights(&tile, &of_tile, device.stream()));
}

static void contrastive_sigmoid_cuda(Tensor products, std::vector<int64_t> place, double scale,
                                     std::vector<Tensor> options, Tensor bias, double factor, Tensor weights,
                                     Tensor rest, Tensor rows, Tensor of_scale, Tensor of_bias) {
  const OnDevice device(products);
  const auto tile = tile_of(products, place, scale, options);
  const int64_t last = tile.first_row + tile.rows;
  STD_TORCH_CHECK(rows.numel() > 0, "rows must not be empty");
  const auto doubles = [&](const Tensor& tensor) {
    return optional_on_cuda<double>(tensor, ScalarType::Double, products, last);
  };
  const cuda::ContrastiveSigmoid of_tile = {
      optional_array(bias, "the bias", products), factor, weights.numel() ? weights_array(weights, products) : Array{},
      optional_on_cuda<float>(rest, ScalarType::Float, products, last), doubles(of_scale), doubles(of_bias)};
  check_cuda(cuda_contrastive_sigmoid(&tile, &of_tile, doubles(rows), device.stream()));
}

// What a loss of one tile works with, in one tensor: its gradients need the numbers, what counts with classes, and the
// rest of the positives' weights where these are rounded to 16 bits.
struct OneTile {
  double *numbers, *rows, *of_positives, *counted, *columns, *parts;
  float* rest;

  static int64_t size(const cuda::ContrastiveTile& tile) {
    return 3 + 4 * tile.rows + tile.columns + cuda_contrastive_parts(&tile);
  }
  OneTile(const Tensor& memory, const cuda::ContrastiveTile& tile, const Array& weights) {
    numbers = static_cast<double*>(memory.data_ptr());
    rows = numbers + 3;
    of_positives = rows + tile.rows;
    counted = of_positives + tile.rows;
    columns = counted + 2 * tile.rows;
    parts = columns + tile.columns;
    const bool made_good = weights.data && is_16_bits(weights.dtype) && tile.shift >= 0;
    rest = made_good ? reinterpret_cast<float*>(counted + tile.rows) : nullptr;
  }
};

// -> the loss [], what OneTile finds in memory, and the pairs' weights if they are wanted
static std::tuple<Tensor, Tensor, Tensor> contrastive_one_tile_cuda(
    Tensor query, Tensor key, int64_t shift, bool symmetric, bool divides, double of_rows, double of_columns,
    double divisor, double of_weights, double scale, MaybeTensor row_labels, MaybeTensor column_labels,
    MaybeTensor excluded, MaybeTensor factor, MaybeTensor classes, MaybeTensor bias, bool wide, bool wanted,
    bool of_scale) {
  const OnDevice device(query);
  STD_TORCH_CHECK(query.scalar_type() == key.scalar_type(), "query and key must have one dtype");
  const bool narrow = is_16_bits(cuda_array_of(query, "query", query.get_device_index()).dtype);
  const Tensor products = product(query, torch::stable::transpose(key, 0, 1),
                                  narrow ? ScalarType::Float : query.scalar_type(), wide);
  const std::array<MaybeTensor, 6> options = {std::nullopt, row_labels, column_labels, excluded, factor, classes};
  const auto tile = tile_of(products, {0, 0, products.size(1), shift, symmetric, divides}, scale, options);
  const bool sigmoid = is_there(bias);
  STD_TORCH_CHECK(!(symmetric || of_columns) || tile.rows == tile.columns,
                  "a tile that is symmetric or has sums by columns must have as many rows as columns");
  const Tensor weights = !wanted  ? memory_on(query, {0}, query.scalar_type())
                         : narrow ? memory_on(query, {tile.rows, tile.columns}, query.scalar_type())
                                  : products;
  const Array to = wanted ? weights_array(weights, products) : Array{};
  const Tensor loss = memory_on(products, {}, products.scalar_type());
  const Tensor memory = memory_on(products, {OneTile::size(tile)}, ScalarType::Double);
  const OneTile at(memory, tile, to);
  cuda::ContrastiveReduction reduction = {
      at.rows, nullptr, nullptr, nullptr, tile.rows, of_rows, of_columns, divisor, nullptr, nullptr, 0,
      symmetric ? 0.5 : 1.0, cuda_array_of(loss, "loss", products.get_device_index()), at.numbers};
  if (sigmoid) {
    if (wanted) {
      reduction.parts = tile.rows;
      reduction.of_scale = at.of_positives;
      reduction.of_bias = at.counted;
    }
    const cuda::ContrastiveSigmoid given = {
        optional_array(bias, "the bias", products), of_weights, to, at.rest,
        wanted ? at.of_positives : nullptr, wanted ? at.counted : nullptr};
    check_cuda(cuda_contrastive_sigmoid(&tile, &given, at.rows, device.stream()));
  } else {
    double* const columns = of_columns ? at.columns : nullptr;
    double* const counted = tile.classes ? at.counted : nullptr;
    reduction.columns = columns;
    reduction.of_positives = at.of_positives;
    reduction.counted = counted;
    check_cuda(cuda_contrastive_sums(&tile, at.rows, columns, at.of_positives, counted, device.stream()));
    if (wanted) {
      // Of a symmetric loss a pair's weight has the sums of both rows: one product makes the gradient.
      cuda::ContrastiveWeights given = {at.rows, symmetric ? at.rows : columns, counted, counted, nullptr,
                                        {of_rows, of_columns, -1.0}, of_weights, to, at.rest,
                                        of_scale ? at.parts : nullptr};
      if (symmetric) {
        given.constants[0] = given.constants[1] = 1;
        given.constants[2] = -2;
      }
      if (of_scale) {
        reduction.of_scale = at.parts;
        reduction.parts = cuda_contrastive_parts(&tile);
      }
      check_cuda(cuda_contrastive_weights(&tile, &given, device.stream()));
    }
  }
  check_cuda(cuda_contrastive_reduce(&tile, &reduction, device.stream()));
  return {loss, memory, weights};
}

// Two products of the weights and the rows, and the last step, for the memory that is given.
static std::tuple<Tensor, Tensor> contrastive_finish_cuda(
    Tensor weights, int64_t shift, bool symmetric, bool divides, double of_weights, double scale, MaybeTensor factor,
    MaybeTensor classes, Tensor query, Tensor key, bool wide, bool of_query, bool of_key, Tensor grad, Tensor memory,
    MaybeTensor to_scale, MaybeTensor to_bias) {
  const OnDevice device(weights);
  const std::array<MaybeTensor, 6> options = {std::nullopt, std::nullopt, std::nullopt, std::nullopt, factor, classes};
  const auto tile = tile_of(weights, {0, 0, weights.size(1), shift, symmetric, divides}, scale, options, false);
  const Tensor rows[2] = {query, key};
  const bool wanted[2] = {of_query, of_key};
  cuda::ContrastiveGradients gradients = {};
  gradients.width = rows[0].size(1);
  gradients.factor = of_weights;
  for (int side = 0; side < 2; ++side) {
    gradients.rows[side] = cuda_array_of(rows[side], "rows", weights.get_device_index());
    gradients.counts[side] = rows[side].size(0);
    STD_TORCH_CHECK(rows[side].size(0) == weights.size(side) && rows[side].size(1) == gradients.width &&
                        rows[side].scalar_type() == weights.scalar_type(),
                    "rows must be those of the tile");
  }
  STD_TORCH_CHECK(grad.numel() == 1 && memory.numel() == OneTile::size(tile), "one grad and the memory must be given");
  const ScalarType dtype = is_16_bits(gradients.rows[0].dtype) ? ScalarType::Float : weights.scalar_type();
  std::optional<Tensor> sums[2], to[2];  // they live until the launch
  for (int side = 0; side < 2; ++side) {
    if (!wanted[side]) {
      to[side] = memory_on(weights, {0}, weights.scalar_type());
      continue;
    }
    const Tensor first = side ? torch::stable::transpose(weights, 0, 1) : weights;
    sums[side] = product(first, rows[1 - side], dtype, wide);
    const bool fits = dtype == weights.scalar_type();  // the sums become the gradient in their place
    to[side] = fits ? *sums[side] : memory_on(weights, {rows[side].size(0), gradients.width}, weights.scalar_type());
    gradients.sums[side] = cuda_array_of(*sums[side], "sums", weights.get_device_index());
    gradients.to[side] = cuda_array_of(*to[side], "the gradient", weights.get_device_index());
  }
  optional_on_cuda<const double>(memory, ScalarType::Double, weights, 1);  // it is checked
  const OneTile at(memory, tile, cuda_array_of(weights, "weights", weights.get_device_index()));
  gradients.rest = at.rest;
  gradients.counted = tile.classes ? at.counted : nullptr;
  gradients.numbers = at.numbers;
  gradients.grad = cuda_array_of(grad, "grad", weights.get_device_index());
  gradients.to_scale = optional_array(to_scale, "the scale's gradient", weights);
  gradients.to_bias = optional_array(to_bias, "the bias's gradient", weights);
  check_cuda(cuda_contrastive_finish(&tile, &gradients, device.stream()));
  return {*to[0], *to[1]};
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
  m.impl("contrastive_one_tile", TORCH_BOX(&contrastive_one_tile_cuda));
  m.impl("contrastive_finish", TORCH_BOX(&contrastive_finish_cuda));
  m.impl("contrastive_in_one", TORCH_BOX(&contrastive_in_one_cuda));
}

}  // namespace fedkernels

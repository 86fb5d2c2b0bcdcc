// The contrastive losses between torch's products: sums of the exponentials of a tile of logits by its rows and
// columns, and the weights of its pairs, which two more products make gradients of.
//
// A tile lies in the second-level cache, so each kernel may read it twice. Log-sum-exps are float64 in memory, and a
// difference to one is formed in two steps: a float32 exponent is as exact where logits are thousands as where they
// are small.
#include "cuda/contrastive.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int THREADS = 256, GROUPS = 32, ROWS_OF_BLOCK = 16;

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float log_of_one_and(float x) { return log1pf(x); }
__device__ inline double log_of_one_and(double x) { return log1p(x); }

// exp((x - y) scale); equal infinities count as equal numbers.
template <typename Number>
__device__ inline Number exponential_of_difference(Number x, Number y, Number scale) {
  return x == y ? 1 : exponential((x - y) * scale);
}

__device__ inline double log_of_sum(double x, double y) {
  const double larger = x < y ? y : x, smaller = x < y ? x : y;
  return larger + log1p(x == y ? 1 : exp(smaller - larger));
}

__device__ inline double scale_of(const ContrastiveTile& tile) {
  if (!tile.factor.data) return tile.scale;
  const double factor = read_one(tile.factor, 0);
  return tile.divides ? tile.scale / factor : tile.scale * factor;
}

__device__ inline int64_t positive_of(const ContrastiveTile& tile, int64_t row) {
  if (tile.positives) return tile.positives[row];
  if (tile.shift < 0) return -1;
  return (row + tile.shift) % tile.all_columns;
}

__device__ inline bool left_out(const ContrastiveTile& tile, int64_t row, int64_t column, int64_t positive) {
  if (column == positive) return false;
  return (tile.leave_out_self && column == row) ||
         (tile.row_labels && tile.row_labels[row] == tile.column_labels[column]) ||
         (tile.excluded && tile.excluded[row * tile.all_columns + column]);
}

// One block a row.
template <typename Number>
__global__ void __launch_bounds__(THREADS, 4) row_sums_kernel(ContrastiveTile tile, double* sums, double* of_positives,
                                                              double* counted) {
  SHARED(largest_of_warps, Number[THREADS / 32]);
  SHARED(total_of_warps, double[THREADS / 32]);
  const int64_t row = tile.first_row + blockIdx.x, positive = positive_of(tile, row);
  const Number* const products = static_cast<const Number*>(tile.products) + blockIdx.x * tile.columns;
  const double exact_scale = scale_of(tile);
  const Number scale = static_cast<Number>(exact_scale);
  Number largest = -INFINITY, total = 0;
  for (int64_t c = threadIdx.x; c < tile.columns; c += THREADS) {
    if (!left_out(tile, row, tile.first_column + c, positive)) largest = Greatest()(largest, products[c]);
  }
  largest = block_reduce(largest, largest_of_warps, Greatest());
  for (int64_t c = threadIdx.x; c < tile.columns; c += THREADS) {
    if (left_out(tile, row, tile.first_column + c, positive)) continue;
    total += exponential_of_difference(products[c], largest, scale);
  }
  const double sum = block_reduce(static_cast<double>(total), total_of_warps, Sum());
  double of_class = 0, members = 0;
  if (tile.classes) {
    for (int64_t c = threadIdx.x; c < tile.columns; c += THREADS) {
      if (c == row || tile.classes[c] != tile.classes[row]) continue;
      of_class += products[c];
      ++members;
    }
    of_class = block_reduce(of_class, total_of_warps, Sum());
    members = block_reduce(members, total_of_warps, Sum());
  }
  if (threadIdx.x) return;
  const bool first = tile.first_column == 0;
  sums[row] = log_of_sum(first ? -INFINITY : sums[row], largest * exact_scale + log(sum));
  if (counted) counted[row] = members > 0;
  if (!of_positives) return;
  const int64_t in_tile = positive - tile.first_column;
  if (tile.classes) {
    of_positives[row] = members > 0 ? of_class / members * exact_scale : 0;
  } else if (in_tile >= 0 && in_tile < tile.columns) {
    of_positives[row] = products[in_tile] * exact_scale;
  } else if (first) {
    of_positives[row] = NAN;
  }
}

// One block for 32 columns: a lane has a column, a warp every 32nd row of them.
template <typename Number>
__global__ void __launch_bounds__(32 * GROUPS) column_sums_kernel(ContrastiveTile tile, double* sums) {
  SHARED(of_groups, Number[GROUPS][32]);
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane, column = tile.first_column + c;
  const int64_t rows = c < tile.columns ? tile.rows : 0;
  const Number* const products = static_cast<const Number*>(tile.products) + c;
  const double exact_scale = scale_of(tile);
  const Number scale = static_cast<Number>(exact_scale);
  const auto counts = [&](int64_t r) {
    return !left_out(tile, tile.first_row + r, column, positive_of(tile, tile.first_row + r));
  };
  Number largest = -INFINITY, total = 0;
  for (int64_t r = group; r < rows; r += GROUPS) {
    if (counts(r)) largest = Greatest()(largest, products[r * tile.columns]);
  }
  of_groups[group][lane] = largest;
  __syncthreads();
  for (int i = 0; i < GROUPS; ++i) largest = Greatest()(largest, of_groups[i][lane]);
  for (int64_t r = group; r < rows; r += GROUPS) {
    if (counts(r)) total += exponential_of_difference(products[r * tile.columns], largest, scale);
  }
  __syncthreads();  // all have read the largest
  of_groups[group][lane] = total;
  __syncthreads();
  if (group || c >= tile.columns) return;
  double sum = 0;
  for (int i = 0; i < GROUPS; ++i) sum += of_groups[i][lane];
  sums[column] = log_of_sum(tile.first_row ? sums[column] : -INFINITY, largest * exact_scale + log(sum));
}

// A log-sum-exp in units of the products, and the weight of its exponentials.
template <typename Number>
struct Sums {
  Number high, low, weight;

  __device__ void read(const double* sums, const double* weights, double constant, int64_t index, double scale) {
    const double sum = weights || constant != 0 ? sums[index] / scale : -INFINITY;
    high = static_cast<Number>(sum);
    low = fabs(sum) < INFINITY ? static_cast<Number>(sum - high) : 0;
    weight = static_cast<Number>(weights ? weights[index] : constant);
  }
  // Where nothing was summed, nothing has a weight.
  __device__ Number weight_of(Number product, Number scale) const {
    return high == -INFINITY ? 0 : exponential((product - high - low) * scale) * weight;
  }
};

// Writes the value, and returns it as it was rounded.
template <typename Number>
__device__ inline Number stored(const Array& to, int64_t at, Number value) {
  if (to.dtype == DType::bf16) {
    const uint16_t bits = float_to_bfloat(static_cast<float>(value));
    static_cast<uint16_t*>(to.data)[at] = bits;
    return bfloat_to_float(bits);
  }
  if (to.dtype == DType::f16) {
    const uint16_t bits = float_to_half(static_cast<float>(value));
    static_cast<uint16_t*>(to.data)[at] = bits;
    return half_to_float(bits);
  }
  static_cast<Number*>(to.data)[at] = value;
  return value;
}

// A thread has a column, and some rows of it. Blocks lie in one row of the grid, whose other sides end at 65,535.
template <typename Number>
__global__ void __launch_bounds__(THREADS) weights_kernel(ContrastiveTile tile, ContrastiveWeights given) {
  SHARED(of_rows, Sums<Number>[ROWS_OF_BLOCK]);
  SHARED(positives, int64_t[ROWS_OF_BLOCK]);
  SHARED(of_warps, double[THREADS / 32]);
  const unsigned across = static_cast<unsigned>((tile.columns + THREADS - 1) / THREADS);
  const int64_t first = static_cast<int64_t>(blockIdx.x / across) * ROWS_OF_BLOCK;
  const double exact_scale = scale_of(tile);
  const int rows = static_cast<int>(tile.rows - first < ROWS_OF_BLOCK ? tile.rows - first : ROWS_OF_BLOCK);
  if (static_cast<int>(threadIdx.x) < rows) {
    const int64_t row = tile.first_row + first + threadIdx.x;
    of_rows[threadIdx.x].read(given.rows, given.row_weights, given.constants[0], row, exact_scale);
    positives[threadIdx.x] = positive_of(tile, row);
  }
  __syncthreads();
  const int64_t c = static_cast<int64_t>(blockIdx.x % across) * THREADS + threadIdx.x, column = tile.first_column + c;
  const bool there = c < tile.columns;
  Sums<Number> of_column;
  if (there) of_column.read(given.columns, given.column_weights, given.constants[1], column, exact_scale);
  const Number* const products = static_cast<const Number*>(tile.products);
  const Number scale = static_cast<Number>(exact_scale), factor = static_cast<Number>(given.factor);
  double of_scale = 0;
  for (int r = 0; there && r < rows; ++r) {
    const int64_t row = tile.first_row + first + r, at = (first + r) * tile.columns + c;
    const Number product = products[at];
    Number weight = 0;
    if (!left_out(tile, row, column, positives[r])) {
      weight = of_rows[r].weight_of(product, scale) + of_column.weight_of(product, scale);
    }
    const bool positive = column == positives[r];
    if (positive) {
      weight += static_cast<Number>(given.positive_weights ? given.positive_weights[row] : given.constants[2]);
    }
    of_scale += static_cast<double>(weight) * product;
    const Number rest = weight * factor - stored(given.weights, at, weight * factor);
    if (positive && given.rest) given.rest[row] = static_cast<float>(rest);
  }
  if (!given.of_scale) return;
  of_scale = block_reduce(of_scale, of_warps, Sum());
  if (threadIdx.x == 0) given.of_scale[blockIdx.x] = of_scale;
}

// One block a row.
template <typename Number>
__global__ void __launch_bounds__(THREADS) sigmoid_kernel(ContrastiveTile tile, ContrastiveSigmoid given, double* sums) {
  SHARED(of_warps, double[THREADS / 32]);
  const int64_t row = tile.first_row + blockIdx.x, positive = positive_of(tile, row) - tile.first_column;
  const Number* const products = static_cast<const Number*>(tile.products) + blockIdx.x * tile.columns;
  const Number scale = static_cast<Number>(scale_of(tile)), factor = static_cast<Number>(given.factor);
  const Number bias = given.bias.data ? static_cast<Number>(read_one(given.bias, 0)) : 0;
  Number total = 0;
  double of_scale = 0, of_bias = 0;
  for (int64_t c = threadIdx.x; c < tile.columns; c += THREADS) {
    const Number product = products[c], sign = c == positive ? 1 : -1, margin = sign * (product * scale + bias);
    const Number small = exponential(margin < 0 ? margin : -margin);  // exp(-|margin|)
    total += log_of_one_and(small) + (margin < 0 ? -margin : 0);
    if (!given.weights.data) continue;
    const Number weight = -sign * (margin < 0 ? 1 / (1 + small) : small / (1 + small));
    of_scale += static_cast<double>(weight) * product;
    of_bias += weight;
    const Number rest = weight * factor - stored(given.weights, blockIdx.x * tile.columns + c, weight * factor);
    if (c == positive && given.rest) given.rest[row] = static_cast<float>(rest);
  }
  const auto add = [&](double* to, double value) {
    if (!to) return;
    value = block_reduce(value, of_warps, Sum());
    if (threadIdx.x == 0) to[row] = tile.first_column ? to[row] + value : value;
  };
  add(sums, total);
  add(given.of_scale, of_scale);
  add(given.of_bias, of_bias);
}

// One block.
__global__ void __launch_bounds__(THREADS) reduce_kernel(ContrastiveTile tile, ContrastiveReduction given) {
  SHARED(of_warps, double[THREADS / 32]);
  double losses = 0, positives = 0, counted = 0, of_scale = 0, of_bias = 0;
  for (int64_t i = threadIdx.x; i < given.count; i += THREADS) {
    if (given.counted && given.counted[i] == 0) continue;
    const double of_columns = given.columns ? given.of_columns * given.columns[i] : 0;
    const double positive = given.of_positives ? given.of_positives[i] : 0;
    losses += given.of_rows * given.rows[i] + of_columns - positive;
    positives += positive;
    ++counted;
  }
  for (int64_t part = threadIdx.x; part < given.parts; part += THREADS) {
    if (given.of_scale) of_scale += given.of_scale[part];
    if (given.of_bias) of_bias += given.of_bias[part];
  }
  losses = block_reduce(losses, of_warps, Sum());
  positives = block_reduce(positives, of_warps, Sum());
  counted = block_reduce(counted, of_warps, Sum());
  of_scale = block_reduce(of_scale, of_warps, Sum());
  of_bias = block_reduce(of_bias, of_warps, Sum());
  if (threadIdx.x) return;
  const double divisor = given.divisor ? given.divisor : counted > 1 ? counted : 1, scale = scale_of(tile);
  write_one(given.loss, 0, losses / divisor);
  // With classes the weights are those of the log-sum-exps alone.
  of_scale = given.share * of_scale - (tile.classes ? positives / scale : 0);
  // A scale that is the factor's inverse has the derivative -1 / factor^2.
  const double factor = tile.factor.data ? read_one(tile.factor, 0) : 1;
  given.numbers[0] = (tile.divides ? -tile.scale / (factor * factor) : tile.scale) * of_scale / divisor;
  given.numbers[1] = of_bias / divisor;
  given.numbers[2] = 1 / divisor;
}

// A block has a row of one side, the queries' first.
__global__ void __launch_bounds__(THREADS) finish_kernel(ContrastiveTile tile, ContrastiveGradients given) {
  const int side = blockIdx.x >= given.counts[0] || !given.to[0].data;
  const int64_t row = blockIdx.x - (side && given.to[0].data ? given.counts[0] : 0);
  const double grad = read_one(given.grad, 0), unit = grad * scale_of(tile) * given.numbers[2] / given.factor;
  const Array &others = given.rows[1 - side], &to = given.to[side];
  // The row of the other side whose pair with this one is a positive.
  const int64_t query = (row - tile.shift + tile.all_columns) % tile.all_columns;
  const int64_t other = side ? query : positive_of(tile, row);
  const bool made_good = given.rest && other < given.counts[1 - side];
  const double rest = made_good ? given.rest[side ? other : row] : 0;
  for (int64_t column = threadIdx.x; to.data && column < given.width; column += THREADS) {
    double sum = read_one(given.sums[side], row * given.width + column);
    if (made_good) sum += rest * read_one(others, other * given.width + column);
    if (tile.classes && given.counted[row] > 0) {  // both of a pair have the weight -1 / members
      double of_class = 0, members = 0;
      for (int64_t i = 0; i < given.counts[0]; ++i) {
        if (i == row || tile.classes[i] != tile.classes[row]) continue;
        of_class += read_one(given.rows[0], i * given.width + column);
        ++members;
      }
      sum -= 2 * given.factor / members * of_class;
    }
    write_one(to, row * given.width + column, unit * sum);
  }
  if (blockIdx.x || threadIdx.x) return;
  if (given.to_scale.data) write_one(given.to_scale, 0, grad * given.numbers[0]);
  if (given.to_bias.data) write_one(given.to_bias, 0, grad * given.numbers[1]);
}

unsigned blocks(int64_t count, int64_t of_block) { return static_cast<unsigned>((count + of_block - 1) / of_block); }

template <typename Number>
const char* sums_of(const ContrastiveTile& tile, double* rows, double* columns, double* of_positives, double* counted,
                    Stream stream) {
  const Shape of_rows = {dim3(blocks(tile.rows, 1)), dim3(THREADS)};
  const char* error = launch(of_rows, stream, row_sums_kernel<Number>, tile, rows, of_positives, counted);
  if (error || !columns) return error;
  const Shape of_columns = {dim3(blocks(tile.columns, 32)), dim3(32 * GROUPS)};
  return launch(of_columns, stream, column_sums_kernel<Number>, tile, columns);
}

}  // namespace

}  // namespace fedkernels::cuda

using namespace fedkernels::cuda;

extern "C" const char* cuda_contrastive_sums(const ContrastiveTile* tile, double* rows, double* columns,
                                             double* of_positives, double* counted, Stream stream) {
  const auto sums = tile->wide ? sums_of<double> : sums_of<float>;
  return sums(*tile, rows, columns, of_positives, counted, stream);
}

extern "C" int64_t cuda_contrastive_parts(const ContrastiveTile* tile) {
  return blocks(tile->columns, THREADS) * blocks(tile->rows, ROWS_OF_BLOCK);
}

extern "C" const char* cuda_contrastive_weights(const ContrastiveTile* tile, const ContrastiveWeights* given,
                                                Stream stream) {
  const Shape shape = {dim3(static_cast<unsigned>(cuda_contrastive_parts(tile))), dim3(THREADS)};
  return launch(shape, stream, tile->wide ? weights_kernel<double> : weights_kernel<float>, *tile, *given);
}

extern "C" const char* cuda_contrastive_sigmoid(const ContrastiveTile* tile, const ContrastiveSigmoid* given,
                                                double* rows, Stream stream) {
  const Shape shape = {dim3(blocks(tile->rows, 1)), dim3(THREADS)};
  return launch(shape, stream, tile->wide ? sigmoid_kernel<double> : sigmoid_kernel<float>, *tile, *given, rows);
}

extern "C" const char* cuda_contrastive_reduce(const ContrastiveTile* tile, const ContrastiveReduction* given,
                                               Stream stream) {
  return launch({dim3(1), dim3(THREADS)}, stream, reduce_kernel, *tile, *given);
}

extern "C" const char* cuda_contrastive_finish(const ContrastiveTile* tile, const ContrastiveGradients* given,
                                               Stream stream) {
  const int64_t rows = (given->to[0].data ? given->counts[0] : 0) + (given->to[1].data ? given->counts[1] : 0);
  return launch({dim3(blocks(rows > 0 ? rows : 1, 1)), dim3(THREADS)}, stream, finish_kernel, *tile, *given);
}

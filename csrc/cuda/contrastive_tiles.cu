// The contrastive losses between torch's products: sums of the exponentials of a tile of logits by its rows and
// columns, and the weights of its pairs, which two more products make gradients of.
//
// Each kernel reads a tile once, several entries before it uses the first, for a tile need not fit into the second-level
// cache. Log-sum-exps are float64 in memory, and a difference to one is formed in two steps: a float32 exponent is as
// exact where logits are thousands as where they are small.
#include "cuda/contrastive.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int THREADS = 256, ROWS_OF_BLOCK = 32, AT_ONCE = 8;
template <typename Number>
constexpr int GROUPS = sizeof(Number) == 8 ? 16 : 32;  // of the threads of 32 columns: more have too few registers
constexpr double LOG2_OF_E = 1.4426950408889634;

__device__ inline float power_of_two(float x) { return exp2_approximate(x); }
__device__ inline double power_of_two(double x) { return exp2(x); }
__device__ inline float log_of_one_and(float x) { return log1pf(x); }
__device__ inline double log_of_one_and(double x) { return log1p(x); }

// Adds 2^(x_k unit) to a total of such powers; all are divided by the largest, 2^(largest unit).
template <typename Number>
__device__ inline void add_powers(const Number (&x)[AT_ONCE], Number unit, Number* largest, Number* total) {
  Number top = *largest;
#pragma unroll
  for (int k = 0; k < AT_ONCE; ++k) top = Greatest()(top, x[k]);
  if (top > *largest) {
    *total = *largest == -INFINITY ? 0 : *total * power_of_two((*largest - top) * unit);
    *largest = top;
  }
  const Number base = fabs(top) < INFINITY ? top : 0;  // with an infinite top the total is 0 or infinite
#pragma unroll
  for (int k = 0; k < AT_ONCE; ++k) *total += power_of_two((x[k] - base) * unit);
}

// What a total counts once the largest of all threads is known.
template <typename Number>
__device__ inline double total_below(Number top, Number unit, Number largest, Number total) {
  return largest == top ? total : total * power_of_two((largest - top) * unit);
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

// The scale of exponents. It is never 0, however high the temperature: a logit of minus infinity keeps its value, and a
// log-sum-exp divided by the scale is finite in Number.
template <typename Number>
__device__ inline double scale_of_exponents(const ContrastiveTile& tile) {
  constexpr double LEAST = sizeof(Number) == 8 ? 1e-300 : 1e-36;
  const double scale = scale_of(tile);
  return fabs(scale) < LEAST ? LEAST : scale;
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

// Where `index` is the number of both a row and a column of the tile and no pair: its column (or row), else -1.
__device__ inline int itself(const ContrastiveTile& tile, int64_t index, int64_t first, int64_t count) {
  const bool pair = !tile.leave_out_self || positive_of(tile, index) == index;
  return pair || index < first || index >= first + count ? -1 : static_cast<int>(index - first);
}

__device__ inline int in_tile(const ContrastiveTile& tile, int64_t column) {
  const int64_t c = column - tile.first_column;
  return column < 0 || c < 0 || c >= tile.columns ? -1 : static_cast<int>(c);
}

// One block a row. LISTED: labels or a mask leave out pairs.
template <typename Number, bool LISTED>
__global__ void __launch_bounds__(THREADS, sizeof(Number) == 8 ? 2 : 6)
    row_sums_kernel(ContrastiveTile tile, double* sums, double* of_positives, double* counted) {
  SHARED(largest_of_warps, Number[THREADS / 32]);
  SHARED(total_of_warps, double[THREADS / 32]);
  const int64_t row = tile.first_row + blockIdx.x, positive = positive_of(tile, row);
  const Number* const products = static_cast<const Number*>(tile.products) + blockIdx.x * tile.columns;
  const double exact_scale = scale_of_exponents<Number>(tile);
  const Number unit = static_cast<Number>(exact_scale * LOG2_OF_E);
  const int columns = static_cast<int>(tile.columns), self = itself(tile, row, tile.first_column, tile.columns);
  Number largest = -INFINITY, total = 0;
  for (int c = threadIdx.x; c < columns; c += AT_ONCE * THREADS) {
    Number x[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int at = c + k * THREADS;
      const bool out = at >= columns || (LISTED ? left_out(tile, row, tile.first_column + at, positive) : at == self);
      x[k] = out ? -INFINITY : products[at];
    }
    add_powers(x, unit, &largest, &total);
  }
  const Number top = block_reduce(largest, largest_of_warps, Greatest());
  const double sum = block_reduce(total_below(top, unit, largest, total), total_of_warps, Sum());
  double of_class = 0, members = 0;
  if (tile.classes) {
    for (int c = threadIdx.x; c < columns; c += THREADS) {
      if (c == row || tile.classes[c] != tile.classes[row]) continue;
      of_class += products[c];
      ++members;
    }
    of_class = block_reduce(of_class, total_of_warps, Sum());
    members = block_reduce(members, total_of_warps, Sum());
  }
  if (threadIdx.x) return;
  const bool first = tile.first_column == 0;
  sums[row] = log_of_sum(first ? -INFINITY : sums[row], top * exact_scale + log(sum));
  if (counted) counted[row] = members > 0;
  if (!of_positives) return;
  const int at = in_tile(tile, positive);
  if (tile.classes) {
    of_positives[row] = members > 0 ? of_class / members * exact_scale : 0;
  } else if (at >= 0) {
    of_positives[row] = products[at] * exact_scale;
  } else if (first) {
    of_positives[row] = NAN;
  }
}

// One block for 32 columns: a lane has a column, a warp every 32nd (float64: 16th) row of them.
template <typename Number, bool LISTED>
__global__ void __launch_bounds__(32 * GROUPS<Number>, 1) column_sums_kernel(ContrastiveTile tile, double* sums) {
  SHARED(of_groups, Number[GROUPS<Number>][32]);
  SHARED(totals, double[GROUPS<Number>][32]);
  const int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + lane, column = tile.first_column + c;
  const int rows = c < tile.columns ? static_cast<int>(tile.rows) : 0;
  const Number* const products = static_cast<const Number*>(tile.products) + c;
  const double exact_scale = scale_of_exponents<Number>(tile);
  const Number unit = static_cast<Number>(exact_scale * LOG2_OF_E);
  const int self = itself(tile, column, tile.first_row, tile.rows);
  Number largest = -INFINITY, total = 0;
  for (int r = group; r < rows; r += AT_ONCE * GROUPS<Number>) {
    Number x[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int at = r + k * GROUPS<Number>;
      bool out = at >= rows || at == self;
      if (LISTED && !out) out = left_out(tile, tile.first_row + at, column, positive_of(tile, tile.first_row + at));
      x[k] = out ? -INFINITY : products[at * tile.columns];
    }
    add_powers(x, unit, &largest, &total);
  }
  of_groups[group][lane] = largest;
  __syncthreads();
  Number top = largest;
  for (int i = 0; i < GROUPS<Number>; ++i) top = Greatest()(top, of_groups[i][lane]);
  totals[group][lane] = total_below(top, unit, largest, total);
  __syncthreads();
  if (group || c >= tile.columns) return;
  double sum = 0;
  for (int i = 0; i < GROUPS<Number>; ++i) sum += totals[i][lane];
  sums[column] = log_of_sum(tile.first_row ? sums[column] : -INFINITY, top * exact_scale + log(sum));
}

// A log-sum-exp in units of the products, and the weight of its exponentials.
template <typename Number>
struct Sums {
  Number high, low, weight;

  __device__ void read(const double* sums, const double* weights, double constant, int64_t index, double scale) {
    const double sum = weights || constant != 0 ? sums[index] / scale : -INFINITY;
    high = sum == -INFINITY ? INFINITY : static_cast<Number>(sum);  // where nothing was summed, nothing has a weight
    low = fabs(sum) < INFINITY ? static_cast<Number>(sum - high) : 0;
    weight = static_cast<Number>(weights ? weights[index] : constant);
  }
  __device__ Number weight_of(Number product, Number unit) const {
    return power_of_two((product - high - low) * unit) * weight;
  }
};

__device__ inline void round_to(float value, Half* to) { to->bits = float_to_half(value); }
__device__ inline void round_to(float value, BFloat* to) { to->bits = float_to_bfloat(value); }
__device__ inline void round_to(float value, float* to) { *to = value; }
__device__ inline void round_to(double value, double* to) { *to = value; }

// A thread has a column, and some rows of it. Blocks lie in one row of the grid, whose other sides end at 65,535. So many
// blocks at once keep enough reads in flight; left alone the compiler takes the registers of half of them.
template <typename Number, typename To, bool LISTED, bool COLUMNS>
__global__ void __launch_bounds__(THREADS, sizeof(Number) == 8 ? 2 : 4)
    weights_kernel(ContrastiveTile tile, ContrastiveWeights given) {
  struct alignas(16) Row {
    Sums<Number> sums;
    int positive, self;  // columns of the tile
  };
  SHARED(of_rows, Row[ROWS_OF_BLOCK]);
  SHARED(of_warps, double[THREADS / 32]);
  const unsigned across = static_cast<unsigned>((tile.columns + THREADS - 1) / THREADS);
  const int64_t first = static_cast<int64_t>(blockIdx.x / across) * ROWS_OF_BLOCK, first_row = tile.first_row + first;
  const double exact_scale = scale_of_exponents<Number>(tile);
  const int all_rows = static_cast<int>(tile.rows - first < ROWS_OF_BLOCK ? tile.rows - first : ROWS_OF_BLOCK);
  const int columns = static_cast<int>(tile.columns), c = (blockIdx.x % across) * THREADS + threadIdx.x;
  const int rows = c < columns ? all_rows : 0;
  const Number* from = static_cast<const Number*>(tile.products) + first * columns + c;
  Number next[AT_ONCE];
  const auto read_next = [&](int begin) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k, from += columns) next[k] = begin + k < rows ? *from : 0;
  };
  read_next(0);
  if (static_cast<int>(threadIdx.x) < all_rows) {
    const int64_t row = first_row + threadIdx.x;
    Row& here = of_rows[threadIdx.x];
    here.sums.read(given.rows, given.row_weights, given.constants[0], row, exact_scale);
    here.positive = in_tile(tile, positive_of(tile, row));
    here.self = itself(tile, row, tile.first_column, tile.columns);
  }
  __syncthreads();
  const int64_t column = tile.first_column + c;
  Sums<Number> of_column;
  if (COLUMNS && rows > 0) {
    of_column.read(given.columns, given.column_weights, given.constants[1], column, exact_scale);
  }
  To* to = static_cast<To*>(given.weights.data) + first * columns + c;  // perhaps the products' memory
  const Number unit = static_cast<Number>(exact_scale * LOG2_OF_E), factor = static_cast<Number>(given.factor);
  Number of_scale = 0;
  for (int begin = 0; begin < rows; begin += AT_ONCE) {
    Number x[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) x[k] = next[k];
    read_next(begin + AT_ONCE);  // before anything is written, of which the compiler does not know that it is elsewhere
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k, to += columns) {
      const int r = begin + k;
      if (r >= rows) break;
      const Row& here = of_rows[r];
      const bool positive = c == here.positive;
      bool out = c == here.self;
      if (LISTED) out = left_out(tile, first_row + r, column, positive ? column : -1);
      Number weight = here.sums.weight_of(x[k], unit);
      if (COLUMNS) weight += of_column.weight_of(x[k], unit);
      if (out) weight = 0;
      if (positive) {
        weight += static_cast<Number>(given.positive_weights ? given.positive_weights[first_row + r]
                                                             : given.constants[2]);
      }
      of_scale += weight * x[k];
      round_to(weight * factor, to);
      if (positive && given.rest) given.rest[first_row + r] = static_cast<float>(weight * factor - widen(*to));
    }
  }
  if (!given.of_scale) return;
  const double sum = block_reduce(static_cast<double>(of_scale), of_warps, Sum());
  if (threadIdx.x == 0) given.of_scale[blockIdx.x] = sum;
}

// One block a row.
template <typename Number, typename To>
__global__ void __launch_bounds__(THREADS) sigmoid_kernel(ContrastiveTile tile, ContrastiveSigmoid given, double* sums) {
  SHARED(of_warps, double[THREADS / 32]);
  const int64_t row = tile.first_row + blockIdx.x;
  const int columns = static_cast<int>(tile.columns), positive = in_tile(tile, positive_of(tile, row));
  const Number* const products = static_cast<const Number*>(tile.products) + blockIdx.x * tile.columns;
  To* const weights = static_cast<To*>(given.weights.data) + blockIdx.x * tile.columns;
  const Number scale = static_cast<Number>(scale_of(tile)), factor = static_cast<Number>(given.factor);
  const Number bias = given.bias.data ? static_cast<Number>(read_one(given.bias, 0)) : 0;
  Number total = 0, of_scale = 0, of_bias = 0;
  for (int begin = threadIdx.x; begin < columns; begin += AT_ONCE * THREADS) {
    Number x[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) x[k] = begin + k * THREADS < columns ? products[begin + k * THREADS] : 0;
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int c = begin + k * THREADS;
      if (c >= columns) break;
      const Number sign = c == positive ? 1 : -1, margin = sign * (x[k] * scale + bias);
      const Number small = power_of_two(-fabs(margin) * static_cast<Number>(LOG2_OF_E));  // exp(-|margin|)
      total += log_of_one_and(small) + (margin < 0 ? -margin : 0);
      if (!given.weights.data) continue;
      const Number weight = -sign * (margin < 0 ? 1 : small) / (1 + small);
      of_scale += weight * x[k];
      of_bias += weight;
      round_to(weight * factor, weights + c);
      if (c == positive && given.rest) given.rest[row] = static_cast<float>(weight * factor - widen(weights[c]));
    }
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

// Each of the rows, the queries' first and then the keys', has `across` threads, and each of these four columns at once.
__global__ void __launch_bounds__(THREADS, 3)
    finish_kernel(ContrastiveTile tile, ContrastiveGradients given, int64_t rows, unsigned across) {
  const double grad = read_one(given.grad, 0), unit = grad * scale_of(tile) * given.numbers[2] / given.factor;
  const int64_t queries = given.to[0].data ? given.counts[0] : 0, of_block = THREADS / across;
  // A tile of all pairs has fewer than 2^31 rows and columns.
  const unsigned all = static_cast<unsigned>(tile.all_columns), shift = static_cast<unsigned>(tile.shift) % all;
  for (int64_t i = blockIdx.x * of_block + threadIdx.x / across; i < rows; i += gridDim.x * of_block) {
    const int side = i >= queries;
    const int64_t row = side ? i - queries : i;
    const Array &others = given.rows[1 - side], &to = given.to[side];
    // The row of the other side whose pair with this one is a positive.
    const int64_t other = (static_cast<unsigned>(row) + (side ? all - shift : shift)) % all;
    const bool made_good = given.rest && other < given.counts[1 - side];
    const double rest = made_good ? given.rest[side ? other : row] : 0;
    for (int64_t column = threadIdx.x % across * 4; column < given.width; column += across * 4) {
      const int count = static_cast<int>(given.width - column < 4 ? given.width - column : 4);
      double sums[4], positive[4] = {};
      read_four(sums, given.sums[side], row * given.width + column, count);
      if (made_good) read_four(positive, others, other * given.width + column, count);
      double of_class[4] = {}, members = 0;
      if (tile.classes && given.counted[row] > 0) {  // both of a pair have the weight -1 / members
        for (int64_t j = 0; j < given.counts[0]; ++j) {
          if (j == row || tile.classes[j] != tile.classes[row]) continue;
          double one[4];
          read_four(one, given.rows[0], j * given.width + column, count);
#pragma unroll
          for (int k = 0; k < 4; ++k) of_class[k] += one[k];
          ++members;
        }
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (made_good) sums[k] += rest * positive[k];
        if (members > 0) sums[k] -= 2 * given.factor / members * of_class[k];
        sums[k] *= unit;
      }
      write_four(to, row * given.width + column, sums, count);
    }
  }
  if (blockIdx.x || threadIdx.x) return;
  if (given.to_scale.data) write_one(given.to_scale, 0, grad * given.numbers[0]);
  if (given.to_bias.data) write_one(given.to_bias, 0, grad * given.numbers[1]);
}

unsigned blocks(int64_t count, int64_t of_block) { return static_cast<unsigned>((count + of_block - 1) / of_block); }

bool lists(const ContrastiveTile& tile) { return tile.row_labels || tile.excluded; }

template <typename Number>
const char* sums_of(const ContrastiveTile& tile, double* rows, double* columns, double* of_positives, double* counted,
                    Stream stream) {
  const Shape of_rows = {dim3(blocks(tile.rows, 1)), dim3(THREADS)};
  const auto by_rows = lists(tile) ? row_sums_kernel<Number, true> : row_sums_kernel<Number, false>;
  const char* error = launch(of_rows, stream, by_rows, tile, rows, of_positives, counted);
  if (error || !columns) return error;
  const Shape of_columns = {dim3(blocks(tile.columns, 32)), dim3(32 * GROUPS<Number>)};
  const auto by_columns = lists(tile) ? column_sums_kernel<Number, true> : column_sums_kernel<Number, false>;
  return launch(of_columns, stream, by_columns, tile, columns);
}

template <typename Number, typename To>
const char* weights_of(const ContrastiveTile& tile, const ContrastiveWeights& given, Stream stream) {
  const Shape shape = {dim3(static_cast<unsigned>(cuda_contrastive_parts(&tile))), dim3(THREADS)};
  const auto kernel = lists(tile) ? weights_kernel<Number, To, true, true>
                      : given.columns ? weights_kernel<Number, To, false, true>
                                      : weights_kernel<Number, To, false, false>;
  return launch(shape, stream, kernel, tile, given);
}

template <typename Number, typename To>
const char* sigmoid_of(const ContrastiveTile& tile, const ContrastiveSigmoid& given, double* rows, Stream stream) {
  const Shape shape = {dim3(blocks(tile.rows, 1)), dim3(THREADS)};
  return launch(shape, stream, sigmoid_kernel<Number, To>, tile, given, rows);
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
  const auto weights = tile->wide                             ? weights_of<double, double>
                       : given->weights.dtype == fedkernels::DType::bf16 ? weights_of<float, BFloat>
                       : given->weights.dtype == fedkernels::DType::f16  ? weights_of<float, Half>
                                                              : weights_of<float, float>;
  return weights(*tile, *given, stream);
}

extern "C" const char* cuda_contrastive_sigmoid(const ContrastiveTile* tile, const ContrastiveSigmoid* given,
                                                double* rows, Stream stream) {
  const auto sigmoid = tile->wide                             ? sigmoid_of<double, double>
                       : given->weights.dtype == fedkernels::DType::bf16 ? sigmoid_of<float, BFloat>
                       : given->weights.dtype == fedkernels::DType::f16  ? sigmoid_of<float, Half>
                                                              : sigmoid_of<float, float>;
  return sigmoid(*tile, *given, rows, stream);
}

extern "C" const char* cuda_contrastive_reduce(const ContrastiveTile* tile, const ContrastiveReduction* given,
                                               Stream stream) {
  return launch({dim3(1), dim3(THREADS)}, stream, reduce_kernel, *tile, *given);
}

extern "C" const char* cuda_contrastive_finish(const ContrastiveTile* tile, const ContrastiveGradients* given,
                                               Stream stream) {
  const int64_t rows = (given->to[0].data ? given->counts[0] : 0) + (given->to[1].data ? given->counts[1] : 0);
  constexpr unsigned MOST = 2048;  // blocks keep a device busy, and each thread prepares once for its rows
  unsigned across = 1;
  while (across < THREADS && across * 4 < given->width) across *= 2;
  const unsigned some = blocks(rows < 1 ? 1 : rows, THREADS / across);
  const Shape shape = {dim3(some < MOST ? some : MOST), dim3(THREADS)};
  return launch(shape, stream, finish_kernel, *tile, *given, rows, across);
}

// After the products: their inner products, in float64 and in parts, from which every block of the last kernel knows
// the value, and the factors by which the products are to be multiplied.
#include "cuda/linear_cka_blocks.h"

namespace fedkernels::cuda {

namespace {

constexpr int TERMS = 3;          // |x'x|^2, |y'x|^2, |y'y|^2; in sample space <xx', xx'>, <xx', yy'>, <yy', yy'>
constexpr int MOST_SUMS = 256;    // parts of an inner product
constexpr int MOST_BLOCKS = 512;  // for a problem, in the last kernel

template <typename T>
struct Term {
  const T *left, *right;
  int64_t count, left_step, right_step;  // the steps from problem to problem
};

template <typename T>
struct Terms {
  Term<T> terms[TERMS];
};

// partials[problem, term, blocks]: parts of the terms' inner products.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    inner_products_kernel(const Terms<T> given, double* partials, int64_t blocks) {
  SHARED(of_warps, double[WARPS]);
  const int64_t problem = blockIdx.x / blocks, block = blockIdx.x % blocks;
  for (int i = 0; i < TERMS; ++i) {
    const Term<T> term = given.terms[i];
    const T *const left = term.left + problem * term.left_step, *const right = term.right + problem * term.right_step;
    double sum = 0;
#pragma unroll 4
    for (int64_t at = block * THREADS + threadIdx.x; at < term.count; at += THREADS * blocks) {
      sum += static_cast<double>(left[at]) * static_cast<double>(right[at]);
    }
    sum = block_reduce(sum, of_warps, Sum());
    if (threadIdx.x == 0) partials[(problem * TERMS + i) * blocks + block] = sum;
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    combine_kernel(const CKAProducts given, const double* partials, int64_t count, int64_t blocks) {
  const int64_t problem = blockIdx.x / blocks, step = blocks * THREADS;
  const int64_t first = blockIdx.x % blocks * THREADS + threadIdx.x;
  const double* const of_problem = partials + problem * TERMS * count;
  const double xx = block_sum(of_problem, count), yy = block_sum(of_problem + 2 * count, count);
  double cross = block_sum(of_problem + count, count);
  const bool zero = (xx == 0 || yy == 0) && xx + yy == xx + yy;  // beside NaN all is NaN
  const bool negative = cross < 0;                               // by rounding, in sample space
  if (negative) cross = 0;
  const double norms = sqrt(xx) * sqrt(yy), value = zero ? 0 : cross / norms;
  if (first == 0) static_cast<T*>(given.values)[problem] = static_cast<T>(value);

  // d value / dx = 2 y (y'x) / norms - 2 value x (x'x) / xx, and so for y.
  const double of_cross = zero || negative ? 0 : 2 / norms, of_xx = zero ? 0 : -2 * value / xx;
  const double of_yy = zero ? 0 : -2 * value / yy;
  const double x_scale = given.scales[2 * problem], y_scale = given.scales[2 * problem + 1];
  const int64_t x_width = given.x_width, y_width = given.y_width, width = x_width + y_width;
  const int64_t own_size = given.samples ? given.rows * given.rows : width * x_width;
  const int64_t other_size = given.samples ? own_size : y_width * y_width;
  const T* const own = static_cast<const T*>(given.own) + problem * own_size;
  const T* const other = static_cast<const T*>(given.other) + problem * other_size;
  if (given.samples) {
    T* const of_x = given.of_x ? static_cast<T*>(given.of_x) + problem * own_size : nullptr;
    T* const of_y = given.of_y ? static_cast<T*>(given.of_y) + problem * own_size : nullptr;
    for (int64_t i = first; i < own_size; i += step) {
      const double x = static_cast<double>(own[i]), y = static_cast<double>(other[i]);
      if (of_x) of_x[i] = static_cast<T>((of_xx * x + of_cross * y) * x_scale);
      if (of_y) of_y[i] = static_cast<T>((of_cross * x + of_yy * y) * y_scale);
    }
    return;
  }
  if (given.of_x) {
    T* const of_x = static_cast<T*>(given.of_x) + problem * own_size;
    for (int64_t i = first; i < own_size; i += step) {
      of_x[i] = static_cast<T>(static_cast<double>(own[i]) * ((i < x_width * x_width ? of_xx : of_cross) * x_scale));
    }
  }
  if (given.of_y) {
    T* const of_y = static_cast<T*>(given.of_y) + problem * width * y_width;
    for (int64_t i = first; i < width * y_width; i += step) {
      const int64_t row = i / y_width, column = i % y_width;
      const bool of_own = row >= x_width;
      // y'x is read by columns; it is small and comes from the second-level cache.
      const T entry = of_own ? other[i - x_width * y_width] : own[(x_width + column) * x_width + row];
      of_y[i] = static_cast<T>(static_cast<double>(entry) * ((of_own ? of_yy : of_cross) * y_scale));
    }
  }
}

// ---- on the host ----

// Blocks that go through so many entries of a problem, and at most `most`.
int64_t blocks_for(int64_t entries, int64_t most) {
  const int64_t blocks = (entries + 8 * THREADS - 1) / (8 * THREADS);
  return blocks < most ? blocks : most;
}

// How many parts each inner product of a problem has.
int64_t sums_of(const CKAProducts& given) {
  const int64_t side = given.samples ? given.rows : given.x_width > given.y_width ? given.x_width : given.y_width;
  return blocks_for(side * side, MOST_SUMS);
}

template <typename T>
const char* combine(const CKAProducts& given, double* partials, Stream stream) {
  const T *const own = static_cast<const T*>(given.own), *const other = static_cast<const T*>(given.other);
  const int64_t gram = given.rows * given.rows, square = given.x_width * given.x_width;
  const int64_t cross = given.x_width * given.y_width, last = given.y_width * given.y_width;
  const Terms<T> of_samples = {{{own, own, gram, gram, gram}, {own, other, gram, gram, gram},
                                {other, other, gram, gram, gram}}};
  const Terms<T> of_features = {{{own, own, square, square + cross, square + cross},
                                 {own + square, own + square, cross, square + cross, square + cross},
                                 {other, other, last, last, last}}};
  const int64_t entries = given.samples ? gram : cross + (square > last ? square : last);
  const int64_t blocks = given.of_x || given.of_y ? blocks_for(entries, MOST_BLOCKS) : 1;
  const int64_t sums = sums_of(given), problems = given.problems;
  if (!one_dimension(problems * blocks) || !one_dimension(problems * sums)) return "too many problems at once";
  const char* error = launch(shape_of(problems * sums), stream, inner_products_kernel<T>,
                             given.samples ? of_samples : of_features, partials, sums);
  if (error) return error;
  return launch(shape_of(problems * blocks), stream, combine_kernel<T>, given, partials, sums, blocks);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_linear_cka_combine_doubles(const fedkernels::cuda::CKAProducts* products) {
  using namespace fedkernels::cuda;
  return TERMS * products->problems * sums_of(*products);
}

extern "C" const char* cuda_linear_cka_combine(const fedkernels::cuda::CKAProducts* products, double* memory,
                                               fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (products->problems == 0) return nullptr;
  return products->wide ? combine<double>(*products, memory, stream) : combine<float>(*products, memory, stream);
}

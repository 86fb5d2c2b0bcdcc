// After the products: their inner products, in float64 and in parts, from which every block of the last kernel knows
// the value, and the factors by which the products are to be multiplied.
#include "cuda/linear_cka_large_blocks.h"

namespace fedkernels::cuda {

namespace {

constexpr int MOST_SUMS = 256;                     // parts of an inner product
constexpr int MOST_BLOCKS = 512;                   // for a problem, in the last kernels

template <typename T>
struct Term {
  const T *left, *right;
  int64_t count, left_step, right_step;  // the steps from problem to problem
};

template <typename T>
struct Terms {
  Term<T> terms[CKA_SEGMENTS];
  int count;
};

// partials[problem, term, blocks]: parts of the terms' inner products.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    inner_products_kernel(const Terms<T> given, double* partials, int64_t blocks) {
  SHARED(of_warps, double[WARPS]);
  const int64_t problem = blockIdx.x / blocks, block = blockIdx.x % blocks;
  for (int i = 0; i < given.count; ++i) {
    const Term<T> term = given.terms[i];
    const T *const left = term.left + problem * term.left_step, *const right = term.right + problem * term.right_step;
    double sum = 0;
#pragma unroll 4
    for (int64_t at = block * THREADS + threadIdx.x; at < term.count; at += THREADS * blocks) {
      sum += static_cast<double>(left[at]) * static_cast<double>(right[at]);
    }
    sum = block_reduce(sum, of_warps, Sum());
    if (threadIdx.x == 0) partials[(problem * given.count + i) * blocks + block] = sum;
  }
}

__global__ void __launch_bounds__(THREADS) add_partials_kernel(const double* partials, int64_t count, double* sums) {
  const double sum = block_sum(partials + blockIdx.x * count, count);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Blocks for the last kernels: `of_problem` for each problem go through its entries.
struct Share {
  int64_t problem, first, step;

  __device__ explicit Share(int64_t blocks_of_problem)
      : problem(blockIdx.x / blocks_of_problem),
        first(blockIdx.x % blocks_of_problem * THREADS + threadIdx.x),
        step(blocks_of_problem * THREADS) {}
};

template <typename T>
__global__ void __launch_bounds__(THREADS)
    combine_kernel(const CKAProducts given, const double* partials, int64_t count, int64_t blocks_of_problem) {
  const Share share(blocks_of_problem);
  const double* const of_problem = partials + share.problem * 3 * count;
  const double xx = block_sum(of_problem, count), yy = block_sum(of_problem + 2 * count, count);
  double cross = block_sum(of_problem + count, count);
  const bool zero = (xx == 0 || yy == 0) && xx + yy == xx + yy;  // beside NaN all is NaN
  const bool negative = cross < 0;                               // by rounding, in sample space
  if (negative) cross = 0;
  const double norms = sqrt(xx) * sqrt(yy), value = zero ? 0 : cross / norms;
  if (share.first == 0) static_cast<T*>(given.values)[share.problem] = static_cast<T>(value);

  // d value / dx = 2 y (y'x) / norms - 2 value x (x'x) / xx, and so for y.
  const double of_cross = zero || negative ? 0 : 2 / norms, of_xx = zero ? 0 : -2 * value / xx;
  const double of_yy = zero ? 0 : -2 * value / yy;
  const double x_scale = given.scales[2 * share.problem], y_scale = given.scales[2 * share.problem + 1];
  const int64_t x_width = given.x_width, y_width = given.y_width, width = x_width + y_width;
  const int64_t own_size = given.samples ? given.rows * given.rows : width * x_width;
  const int64_t other_size = given.samples ? own_size : y_width * y_width;
  const T* const own = static_cast<const T*>(given.own) + share.problem * own_size;
  const T* const other = static_cast<const T*>(given.other) + share.problem * other_size;
  if (given.samples) {
    T* const of_x = given.of_x ? static_cast<T*>(given.of_x) + share.problem * own_size : nullptr;
    T* const of_y = given.of_y ? static_cast<T*>(given.of_y) + share.problem * own_size : nullptr;
    for (int64_t i = share.first; i < own_size; i += share.step) {
      const double x = static_cast<double>(own[i]), y = static_cast<double>(other[i]);
      if (of_x) of_x[i] = static_cast<T>((of_xx * x + of_cross * y) * x_scale);
      if (of_y) of_y[i] = static_cast<T>((of_cross * x + of_yy * y) * y_scale);
    }
    return;
  }
  if (given.of_x) {
    T* const of_x = static_cast<T*>(given.of_x) + share.problem * own_size;
    for (int64_t i = share.first; i < own_size; i += share.step) {
      of_x[i] = static_cast<T>(static_cast<double>(own[i]) * ((i < x_width * x_width ? of_xx : of_cross) * x_scale));
    }
  }
  if (given.of_y) {
    T* const of_y = static_cast<T*>(given.of_y) + share.problem * width * y_width;
    for (int64_t i = share.first; i < width * y_width; i += share.step) {
      const int64_t row = i / y_width, column = i % y_width;
      const bool of_own = row >= x_width;
      // y'x is read by columns; it is small and comes from the second-level cache.
      const T entry = of_own ? other[i - x_width * y_width] : own[(x_width + column) * x_width + row];
      of_y[i] = static_cast<T>(static_cast<double>(entry) * ((of_own ? of_yy : of_cross) * y_scale));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    combine_to_kernel_kernel(const CKAToKernelProducts given, const double* partials, int64_t count,
                             int64_t blocks_of_problem) {
  const Share share(blocks_of_problem);
  const double* const of_problem = partials + share.problem * 2 * count;
  const double* const scales = given.scales + share.problem * KERNEL_SCALES;
  const double cross = block_sum(of_problem, count), xx = block_sum(of_problem + count, count);
  const double kernel_scale = scales[2], kk = scales[3], scale = scales[0] * scales[1];
  const bool zero = (xx == 0 || kk == 0) && xx + kk == xx + kk;  // beside NaN all is NaN
  const double norms = sqrt(xx) * sqrt(kk), value = zero ? 0 : cross * kernel_scale / norms;
  if (share.first == 0) static_cast<T*>(given.values)[share.problem] = static_cast<T>(value);
  if (!given.gradient) return;

  // d value / dx = 2 (K x) / (|x'x| |K|) - 2 value x (x'x) / |x'x|^2.
  const double of_product = zero ? 0 : 2 * kernel_scale / norms * scale, of_own = zero ? 0 : -2 * value / xx * scale;
  const int64_t size = given.rows * given.width, own_size = given.side * given.side;
  T* const product = static_cast<T*>(given.product) + share.problem * size;
  T* const own = static_cast<T*>(given.own) + share.problem * own_size;
  for (int64_t i = share.first; i < size; i += share.step) {
    product[i] = static_cast<T>(static_cast<double>(product[i]) * of_product);
  }
  for (int64_t i = share.first; i < own_size; i += share.step) {
    own[i] = static_cast<T>(static_cast<double>(own[i]) * of_own);
  }
}

// ---- on the host ----

// Blocks that go through so many entries of a problem, and at most `most`.
int64_t blocks_for(int64_t entries, int64_t most) {
  const int64_t blocks = (entries + 8 * THREADS - 1) / (8 * THREADS);
  return blocks < most ? blocks : most;
}

// -> in *blocks how many parts each of the sums has.
template <typename T>
const char* multiply(const Terms<T>& terms, int64_t problems, double* partials, int64_t* blocks, Stream stream) {
  int64_t longest = 1;
  for (int i = 0; i < terms.count; ++i) {
    if (terms.terms[i].count > longest) longest = terms.terms[i].count;
  }
  *blocks = blocks_for(longest, MOST_SUMS);
  if (!one_dimension(problems * *blocks)) return "too many problems at once";
  return launch(shape_of(problems * *blocks), stream, inner_products_kernel<T>, terms, partials, *blocks);
}

template <typename T>
const char* combine(const CKAProducts& given, double* partials, Stream stream) {
  const T *const own = static_cast<const T*>(given.own), *const other = static_cast<const T*>(given.other);
  const int64_t gram = given.rows * given.rows, square = given.x_width * given.x_width;
  const int64_t cross = given.x_width * given.y_width, last = given.y_width * given.y_width;
  Terms<T> terms = {};
  terms.count = 3;
  if (given.samples) {
    terms.terms[0] = Term<T>{own, own, gram, gram, gram};
    terms.terms[1] = Term<T>{own, other, gram, gram, gram};
    terms.terms[2] = Term<T>{other, other, gram, gram, gram};
  } else {
    terms.terms[0] = Term<T>{own, own, square, square + cross, square + cross};
    terms.terms[1] = Term<T>{own + square, own + square, cross, square + cross, square + cross};
    terms.terms[2] = Term<T>{other, other, last, last, last};
  }
  const int64_t entries = given.samples ? gram : cross + (square > last ? square : last);
  const int64_t blocks = given.of_x || given.of_y ? blocks_for(entries, MOST_BLOCKS) : 1;
  if (!one_dimension(given.problems * blocks)) return "too many problems at once";
  int64_t sums = 0;
  if (const char* error = multiply(terms, given.problems, partials, &sums, stream)) return error;
  return launch(shape_of(given.problems * blocks), stream, combine_kernel<T>, given, partials, sums, blocks);
}

template <typename T>
const char* combine_to_kernel(const CKAToKernelProducts& given, double* partials, Stream stream) {
  const T *const z = static_cast<const T*>(given.z), *const product = static_cast<const T*>(given.product);
  const T* const own = static_cast<const T*>(given.own);
  const int64_t size = given.rows * given.width, own_size = given.side * given.side;
  Terms<T> terms = {};
  terms.count = 2;
  terms.terms[0] = Term<T>{z, product, size, size, size};
  terms.terms[1] = Term<T>{own, own, own_size, own_size, own_size};
  const int64_t blocks = given.gradient ? blocks_for(size, MOST_BLOCKS) : 1;
  if (!one_dimension(given.problems * blocks)) return "too many problems at once";
  int64_t sums = 0;
  if (const char* error = multiply(terms, given.problems, partials, &sums, stream)) return error;
  return launch(shape_of(given.problems * blocks), stream, combine_to_kernel_kernel<T>, given, partials, sums, blocks);
}

template <typename T>
const char* squares(const T* product, const int64_t* lengths, int64_t segments, double* sums, double* partials,
                    Stream stream) {
  Terms<T> terms = {};
  terms.count = static_cast<int>(segments);
  for (int64_t i = 0; i < segments; ++i) {
    terms.terms[i] = Term<T>{product, product, lengths[i], 0, 0};
    product += lengths[i];
  }
  int64_t parts = 0;
  if (const char* error = multiply(terms, 1, partials, &parts, stream)) return error;
  return launch(shape_of(segments), stream, add_partials_kernel, partials, parts, sums);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_linear_cka_combine_doubles(int64_t problems) {
  return 3 * problems * fedkernels::cuda::MOST_SUMS;
}

extern "C" int64_t cuda_linear_cka_squares_doubles(int64_t segments) {
  return segments * fedkernels::cuda::MOST_SUMS;
}

extern "C" const char* cuda_linear_cka_combine(const fedkernels::cuda::CKAProducts* products, double* memory,
                                               fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (products->problems == 0) return nullptr;
  return products->wide ? combine<double>(*products, memory, stream) : combine<float>(*products, memory, stream);
}

extern "C" const char* cuda_linear_cka_combine_to_kernel(const fedkernels::cuda::CKAToKernelProducts* products,
                                                         double* memory, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (products->problems == 0) return nullptr;
  return products->wide ? combine_to_kernel<double>(*products, memory, stream)
                        : combine_to_kernel<float>(*products, memory, stream);
}

extern "C" const char* cuda_linear_cka_squares(const void* product, bool wide, const int64_t* lengths, int64_t segments,
                                               double* sums, double* memory, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  return wide ? squares(static_cast<const double*>(product), lengths, segments, sums, memory, stream)
              : squares(static_cast<const float*>(product), lengths, segments, sums, memory, stream);
}

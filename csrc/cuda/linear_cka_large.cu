// Before the products: maxima, column sums, then z, which is x and y side by side, scaled and centred. A block works on
// 128 columns of a chunk of a matrix's rows and leaves its part of a sum in memory; the next kernel's blocks add the
// parts that they need, all in one order. After the products: their inner products, in float64 and again in parts, from
// which every block of the last kernel knows the value, and the factors by which the products are to be multiplied.
#include "cuda/linear_cka_large.h"

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int WIDTH = 128;                         // columns of a part: four for each lane
constexpr int MOST_CHUNKS = 32, LEAST_ROWS = 64;   // of the rows, in a part
constexpr int MOST_SUMS = 256;                     // parts of an inner product
constexpr int MOST_BLOCKS = 512;                   // for a problem, in the last kernels
constexpr int KERNEL_SCALES = 4;                   // of a problem, see cuda_linear_cka_prepare_to_kernel

// ---- before the products ----

template <typename T>
__device__ inline T block_largest(const T* maxima, int64_t count) {
  SHARED(of_warps, T[WARPS]);
  T largest = 0;
  for (int64_t i = threadIdx.x; i < count; i += THREADS) largest = Greatest()(maxima[i], largest);
  return block_reduce(largest, of_warps, Greatest());
}

// How many parts there are. It depends on sizes only, so that sums have the same order on every device.
struct Parts {
  int64_t rows_of_chunk, chunks, tiles;  // tiles: WIDTH columns, of all matrices

  __host__ __device__ explicit Parts(const CKAMatrices& given) {
    rows_of_chunk = (given.rows + MOST_CHUNKS - 1) / MOST_CHUNKS;
    if (rows_of_chunk < LEAST_ROWS) rows_of_chunk = LEAST_ROWS;
    chunks = (given.rows + rows_of_chunk - 1) / rows_of_chunk;
    tiles = 0;
    for (int i = 0; i < given.count; ++i) tiles += tiles_of(given.widths[i]);
  }
  static __host__ __device__ int64_t tiles_of(int64_t width) { return (width + WIDTH - 1) / WIDTH; }
  __host__ __device__ int64_t of_problem() const { return tiles * chunks; }
};

// A block's part.
struct Part : Parts {
  Array source;
  int64_t problem, chunk, width, start;  // start: the entry at which the matrix begins
  int64_t matrix, first_tile, tile;      // first_tile: the matrix's first; tile: this part's, within the matrix
  int64_t column, from, to;              // first column, and rows
  int64_t columns_before;                // of the matrices before

  __device__ explicit Part(const CKAMatrices& given) : Parts(given) {
    const int64_t block = blockIdx.x;
    problem = block / of_problem();
    chunk = block % chunks;
    tile = block % of_problem() / chunks;
    matrix = first_tile = columns_before = 0;
    while (tile >= tiles_of(given.widths[matrix])) {
      const int64_t passed = tiles_of(given.widths[matrix]);
      tile -= passed;
      first_tile += passed;
      columns_before += given.widths[matrix++];
    }
    source = given.matrices[matrix];
    width = given.widths[matrix];
    start = problem * given.rows * width;
    column = tile * WIDTH;
    from = chunk * rows_of_chunk;
    to = from + rows_of_chunk < given.rows ? from + rows_of_chunk : given.rows;
  }
  __device__ int lane_column() const { return 4 * (threadIdx.x % 32); }
  // Of the four columns that begin there, how many the matrix has; 0 or less: none.
  __device__ int count() const {
    const int64_t left = width - column - lane_column();
    return left < 4 ? static_cast<int>(left) : 4;
  }
  // The block that has a tile and a chunk of this problem; the tile is counted over all matrices.
  __device__ int64_t block_of(int64_t of_tile, int64_t of_chunk) const {
    return (problem * tiles + of_tile) * chunks + of_chunk;
  }
  // The largest magnitude of the whole matrix. Every thread of the block calls this.
  template <typename T>
  __device__ T largest(const T* maxima) const {
    return block_largest(maxima + block_of(first_tile, 0), tiles_of(width) * chunks);
  }
  template <typename T>
  __device__ void read(T (&values)[4], int64_t row) const {
    read_four(values, source, start + row * width + column + lane_column(), count());
  }
  // use(row, values) for this thread's rows; a warp has one row at a time, and all its lanes come.
  template <typename T, typename Use>
  __device__ void each_row(Use use) const {
#pragma unroll 2
    for (int64_t row = from + threadIdx.x / 32; row < to; row += WARPS) {
      T values[4];
      read(values, row);
      use(row, values);
    }
  }
};

// The exponent of a positive number, and 2^exponent; outside the range of normal numbers the nearest.
__device__ inline int exponent_of(float value) {
  return max(static_cast<int>(__float_as_uint(value) >> 23 & 255), 1) - 127;
}
__device__ inline int exponent_of(double value) {
  return max(static_cast<int>(__double_as_longlong(value) >> 52 & 2047), 1) - 1023;
}
__device__ inline void power_of_two(int exponent, float* power) {
  *power = __uint_as_float(static_cast<unsigned>(min(max(exponent, -126), 127) + 127) << 23);
}
__device__ inline void power_of_two(int exponent, double* power) {
  *power = __longlong_as_double(static_cast<long long>(min(max(exponent, -1022), 1023) + 1023) << 52);
}
template <typename T>
__device__ inline bool finite(T value) {
  return value - value == 0;
}

// What brings `largest` to [1, 2), or as near as a power of two does. 0 where it is infinite, so that NaN comes out.
template <typename T>
__device__ inline T scale_for(T largest) {
  T scale = 0;
  if (largest == 0) return 1;
  if (finite(largest)) power_of_two(-exponent_of(largest), &scale);
  return scale;
}

// What z is multiplied by beside x's scale, so that neither kernel z nor z'z leaves the range.
template <typename T>
__device__ inline T scale_beside(T largest_of_kernel) {
  constexpr int range = sizeof(T) == 4 ? 105 : 900;
  T scale = 1;
  if (largest_of_kernel == 0 || !finite(largest_of_kernel)) return scale;
  const int exponent = exponent_of(largest_of_kernel);
  if (exponent > range) power_of_two(range - exponent, &scale);
  if (exponent < -range) power_of_two(-range - exponent, &scale);
  return scale;
}

// The largest magnitude in a part, one for each block.
template <typename T>
__global__ void __launch_bounds__(THREADS) maxima_kernel(const CKAMatrices given, T* maxima) {
  SHARED(of_warps, T[WARPS]);
  const Part part(given);
  T largest = 0;
  part.each_row<T>([&](int64_t, const T(&values)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = Greatest()(values[e] < 0 ? -values[e] : values[e], largest);
  });
  largest = block_reduce(largest, of_warps, Greatest());
  if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

// Adds what the warps have for each of the WIDTH columns, in order. -> sums[column] for thread = column.
__device__ inline double add_warps(const double (&mine)[4]) {
  SHARED(of_warps, double[WARPS][WIDTH]);
#pragma unroll
  for (int e = 0; e < 4; ++e) of_warps[threadIdx.x / 32][4 * (threadIdx.x % 32) + e] = mine[e];
  __syncthreads();
  double sum = 0;
  if (threadIdx.x < WIDTH) {
    for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[warp][threadIdx.x];
  }
  return sum;
}

// sums[block, WIDTH]: the sums of the columns, of which the first row is subtracted.
template <typename T>
__global__ void __launch_bounds__(THREADS) column_sums_kernel(const CKAMatrices given, const T* maxima, double* sums) {
  const Part part(given);
  const T scale = scale_for(part.largest(maxima));
  T first[4];
  part.read(first, 0);
  double mine[4] = {};
  part.each_row<T>([&](int64_t, const T(&values)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) mine[e] += static_cast<double>(values[e] * scale - first[e] * scale);
  });
  const double sum = add_warps(mine);
  if (threadIdx.x < WIDTH) sums[blockIdx.x * static_cast<int64_t>(WIDTH) + threadIdx.x] = sum;
}

// Writes the matrices to z. `scales` has `pitch_of_scales` numbers for each problem, first those of the matrices. Where
// there is a kernel the second is the one beside x's, for `kernel_maxima`: `parts_of_kernel` for each problem, or none
// if the kernel is scaled itself.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    write_kernel(const CKAMatrices given, const T* maxima, const double* sums, const T* kernel_maxima,
                 int64_t parts_of_kernel, T* z, int64_t pitch, double* scales, int64_t pitch_of_scales) {
  SHARED(first_of, T[WIDTH]);
  SHARED(mean_of, T[WIDTH]);
  const Part part(given);
  const T scale = scale_for(part.largest(maxima));
  T beside = 1;
  if (kernel_maxima) {
    beside = scale_beside(block_largest(kernel_maxima + part.problem * parts_of_kernel, parts_of_kernel));
  }
  if (part.tile == 0 && part.chunk == 0 && threadIdx.x == 0) {
    double* const of_problem = scales + part.problem * pitch_of_scales;
    of_problem[part.matrix] = static_cast<double>(scale);
    if (kernel_maxima) of_problem[1] = static_cast<double>(beside);
  }
  if (threadIdx.x < WIDTH) {
    T first = 0;
    double total = 0;
    const int64_t column = part.column + threadIdx.x;
    if (given.centered && column < part.width) {
      first = static_cast<T>(read_one(part.source, part.start + column)) * scale;
      for (int64_t chunk = 0; chunk < part.chunks; ++chunk) {
        total += sums[part.block_of(part.first_tile + part.tile, chunk) * WIDTH + threadIdx.x];
      }
    }
    first_of[threadIdx.x] = first;
    mean_of[threadIdx.x] = static_cast<T>(total / static_cast<double>(given.rows));
  }
  __syncthreads();

  const int column = part.lane_column(), count = part.count();
  T first[4], mean[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    first[e] = first_of[column + e];
    mean[e] = mean_of[column + e];
  }
  part.each_row<T>([&](int64_t row, const T(&values)[4]) {
    T* const to = z + (part.problem * given.rows + row) * pitch + part.columns_before + part.column + column;
    Four<T> four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.values[e] = ((values[e] * scale - first[e]) - mean[e]) * beside;
    if (count == 4 && reinterpret_cast<uintptr_t>(to) % alignof(Four<T>) == 0) {
      *reinterpret_cast<Four<T>*>(to) = four;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (e < count) to[e] = four.values[e];
      }
    }
  });
}

// A kernel's entries, scaled; to be centred the first row is subtracted and then the first column. H(.)H is the same, a
// constant kernel becomes exactly 0, and nothing large cancels in the sums.
template <typename T>
struct KernelEntries {
  const Part& part;
  T scale;
  bool centered;
  double corner, first[4];

  __device__ KernelEntries(const CKAMatrices& kernel, const Part& part, const T* maxima)
      : part(part), scale(scale_for(part.largest(maxima))), centered(kernel.centered), corner(0), first{} {
    if (!centered) return;
    T values[4];
    part.read(values, 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) first[e] = static_cast<double>(values[e] * scale);
    corner = first_of_row(0);
  }
  __device__ double first_of_row(int64_t row) const {
    return static_cast<double>(static_cast<T>(read_one(part.source, part.start + row * part.width)) * scale);
  }
  // What is to be subtracted from a row; every lane of the warp has the same.
  __device__ double shift(int64_t row) const { return centered ? first_of_row(row) - corner : 0; }
  __device__ double operator()(T value, int e, double shift) const {
    return (static_cast<double>(value * scale) - first[e]) - shift;
  }
};

// Of a kernel that is to be centred: column_sums[block, WIDTH] and row_sums[problem, tile, rows].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    kernel_sums_kernel(const CKAMatrices kernel, const T* maxima, double* column_sums, double* row_sums) {
  const Part part(kernel);
  const KernelEntries<T> entries(kernel, part, maxima);
  const int count = part.count();
  double mine[4] = {};
  part.each_row<T>([&](int64_t row, const T(&values)[4]) {
    const double shift = entries.shift(row);
    double of_four = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const double entry = e < count ? entries(values[e], e, shift) : 0;
      mine[e] += entry;
      of_four += entry;
    }
    const double sum = warp_reduce(of_four, Sum());
    if (threadIdx.x % 32 == 0) row_sums[(part.problem * part.tiles + part.tile) * kernel.rows + row] = sum;
  });
  const double sum = add_warps(mine);
  if (threadIdx.x < WIDTH) column_sums[blockIdx.x * static_cast<int64_t>(WIDTH) + threadIdx.x] = sum;
}

// means[problem, 2, rows]: of the columns, then of the rows; totals[problem, tile]: the sum of WIDTH columns' means.
__global__ void __launch_bounds__(THREADS) means_kernel(const CKAMatrices kernel, const double* column_sums,
                                                        const double* row_sums, double* means, double* totals) {
  SHARED(of_warps, double[WARPS]);
  const Parts parts(kernel);
  const int64_t problem = blockIdx.x / parts.tiles, tile = blockIdx.x % parts.tiles, at = tile * WIDTH + threadIdx.x;
  const double rows = static_cast<double>(kernel.rows);
  double column = 0, row = 0;
  if (threadIdx.x < WIDTH && at < kernel.rows) {
    for (int64_t chunk = 0; chunk < parts.chunks; ++chunk) {
      column += column_sums[((problem * parts.tiles + tile) * parts.chunks + chunk) * WIDTH + threadIdx.x];
    }
    for (int64_t t = 0; t < parts.tiles; ++t) row += row_sums[(problem * parts.tiles + t) * kernel.rows + at];
    means[2 * problem * kernel.rows + at] = column / rows;
    means[(2 * problem + 1) * kernel.rows + at] = row / rows;
  }
  const double total = block_reduce(column / rows, of_warps, Sum());
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// sum of from[i] for i < count, in one order.
__device__ inline double block_sum(const double* from, int64_t count) {
  SHARED(of_warps, double[WARPS]);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += THREADS) sum += from[i];
  return block_reduce(sum, of_warps, Sum());
}

// squares[block]: of the scaled kernel's entries. If it is to be centred HKH is written to `centred`, scaled.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    write_kernel_kernel(const CKAMatrices kernel, const T* maxima, const double* means, const double* totals,
                        T* centred, double* squares, double* scales) {
  SHARED(of_warps, double[WARPS]);
  const Part part(kernel);
  const KernelEntries<T> entries(kernel, part, maxima);
  const int count = part.count();
  if (part.tile == 0 && part.chunk == 0 && threadIdx.x == 0) {
    scales[part.problem * KERNEL_SCALES + 2] = centred ? 1 : static_cast<double>(entries.scale);
  }
  const double* const of_columns = means + 2 * part.problem * kernel.rows;
  const double* const of_rows = of_columns + kernel.rows;
  double mean = 0, column_means[4] = {};
  if (centred) {
    mean = block_sum(totals + part.problem * part.tiles, part.tiles) / static_cast<double>(kernel.rows);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < count) column_means[e] = of_columns[part.column + part.lane_column() + e];
    }
  }
  double square = 0;
  part.each_row<T>([&](int64_t row, const T(&values)[4]) {
    const double shift = entries.shift(row), row_mean = centred ? of_rows[row] - mean : 0;
    T* const to = centred + part.start + row * part.width + part.column + part.lane_column();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e >= count) continue;
      const T entry = static_cast<T>((entries(values[e], e, shift) - column_means[e]) - row_mean);
      square += static_cast<double>(entry) * static_cast<double>(entry);
      if (centred) to[e] = entry;
    }
  });
  square = block_reduce(square, of_warps, Sum());
  if (threadIdx.x == 0) squares[blockIdx.x] = square;
}

// A block for each problem.
__global__ void __launch_bounds__(THREADS)
    kernel_norm_kernel(const CKAMatrices kernel, const double* squares, double* scales) {
  const int64_t parts = Parts(kernel).of_problem();
  const double norm = block_sum(squares + blockIdx.x * parts, parts);
  if (threadIdx.x == 0) scales[blockIdx.x * static_cast<int64_t>(KERNEL_SCALES) + 3] = norm;
}

// ---- after the products ----

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

bool one_dimension(int64_t blocks) { return blocks <= 0x7fffffff; }

Shape shape_of(int64_t blocks) { return {static_cast<unsigned>(blocks), THREADS}; }

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

// Where the sums of some matrices lie in memory.
struct Memory {
  double *maxima, *sums, *squares, *row_sums, *means, *totals, *end;  // the last four are a kernel's

  Memory(const CKAMatrices& given, bool kernel, double* start) {
    const Parts parts(given);
    const int64_t blocks = given.problems * parts.of_problem();
    maxima = start;
    sums = maxima + blocks;
    squares = sums + (given.centered ? blocks * WIDTH : 0);
    row_sums = squares + (kernel ? blocks : 0);
    const int64_t centred = kernel && given.centered ? given.problems : 0;
    means = row_sums + centred * parts.tiles * given.rows;
    totals = means + centred * 2 * given.rows;
    end = totals + centred * parts.tiles;
  }
};

template <typename T>
const char* sum_columns(const CKAMatrices& given, const Memory& memory, Stream stream) {
  const int64_t blocks = given.problems * Parts(given).of_problem();
  if (!one_dimension(blocks)) return "too many matrices at once";
  T* const maxima = reinterpret_cast<T*>(memory.maxima);
  const char* error = launch(shape_of(blocks), stream, maxima_kernel<T>, given, maxima);
  if (error || !given.centered) return error;
  return launch(shape_of(blocks), stream, column_sums_kernel<T>, given, maxima, memory.sums);
}

template <typename T>
const char* prepare(const CKAMatrices& given, T* z, int64_t pitch, double* scales, double* start, Stream stream) {
  const Memory memory(given, false, start);
  if (const char* error = sum_columns<T>(given, memory, stream)) return error;
  return launch(shape_of(given.problems * Parts(given).of_problem()), stream, write_kernel<T>, given,
                reinterpret_cast<T*>(memory.maxima), memory.sums, nullptr, 0, z, pitch, scales, given.count);
}

// x and the kernel on their own, as one matrix each.
CKAMatrices one_of(const CKAMatrices& given, int index) {
  CKAMatrices one = given;
  one.count = 1;
  one.matrices[0] = given.matrices[index];
  one.widths[0] = given.widths[index];
  return one;
}

template <typename T>
const char* prepare_to_kernel(const CKAMatrices& given, T* z, T* centred, double* scales, double* start,
                              Stream stream) {
  const CKAMatrices x = one_of(given, 0), kernel = one_of(given, 1);
  const Memory of_x(x, false, start), of_kernel(kernel, true, of_x.end);
  const Parts parts(kernel);
  const int64_t blocks = kernel.problems * parts.of_problem();
  if (!one_dimension(blocks)) return "too many kernels at once";
  const char* error = sum_columns<T>(x, of_x, stream);
  T* const maxima = reinterpret_cast<T*>(of_kernel.maxima);
  if (!error) error = launch(shape_of(blocks), stream, maxima_kernel<T>, kernel, maxima);
  if (!error && kernel.centered) {
    error = launch(shape_of(blocks), stream, kernel_sums_kernel<T>, kernel, maxima, of_kernel.sums, of_kernel.row_sums);
    if (error) return error;
    error = launch(shape_of(kernel.problems * parts.tiles), stream, means_kernel, kernel, of_kernel.sums,
                   of_kernel.row_sums, of_kernel.means, of_kernel.totals);
  }
  if (!error) {
    error = launch(shape_of(blocks), stream, write_kernel_kernel<T>, kernel, maxima, of_kernel.means, of_kernel.totals,
                   kernel.centered ? centred : nullptr, of_kernel.squares, scales);
  }
  if (!error) {
    error = launch(shape_of(kernel.problems), stream, kernel_norm_kernel, kernel, of_kernel.squares, scales);
  }
  if (error) return error;
  return launch(shape_of(x.problems * Parts(x).of_problem()), stream, write_kernel<T>, x,
                reinterpret_cast<T*>(of_x.maxima), of_x.sums, maxima, kernel.centered ? 0 : parts.of_problem(), z,
                x.widths[0], scales, KERNEL_SCALES);
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

extern "C" int64_t cuda_linear_cka_prepare_doubles(const fedkernels::cuda::CKAMatrices* given) {
  double* const start = nullptr;
  return fedkernels::cuda::Memory(*given, false, start).end - start;
}

extern "C" int64_t cuda_linear_cka_prepare_to_kernel_doubles(const fedkernels::cuda::CKAMatrices* given) {
  using namespace fedkernels::cuda;
  double* const start = nullptr;
  return Memory(one_of(*given, 1), true, Memory(one_of(*given, 0), false, start).end).end - start;
}

extern "C" int64_t cuda_linear_cka_combine_doubles(int64_t problems) {
  return 3 * problems * fedkernels::cuda::MOST_SUMS;
}

extern "C" int64_t cuda_linear_cka_squares_doubles(int64_t segments) {
  return segments * fedkernels::cuda::MOST_SUMS;
}

extern "C" const char* cuda_linear_cka_prepare(const fedkernels::cuda::CKAMatrices* given, void* z, int64_t pitch,
                                               double* scales, double* memory, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (given->problems == 0) return nullptr;
  return given->wide ? prepare(*given, static_cast<double*>(z), pitch, scales, memory, stream)
                     : prepare(*given, static_cast<float*>(z), pitch, scales, memory, stream);
}

extern "C" const char* cuda_linear_cka_prepare_to_kernel(const fedkernels::cuda::CKAMatrices* given, void* z,
                                                         void* centred, double* scales, double* memory,
                                                         fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (given->problems == 0) return nullptr;
  if (given->wide) {
    return prepare_to_kernel(*given, static_cast<double*>(z), static_cast<double*>(centred), scales, memory, stream);
  }
  return prepare_to_kernel(*given, static_cast<float*>(z), static_cast<float*>(centred), scales, memory, stream);
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

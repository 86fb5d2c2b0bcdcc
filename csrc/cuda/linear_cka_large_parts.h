// How matrices are shared out to the blocks of linear_cka_large_prepare.cu, and the powers of two that bring them into
// range. A block works on a part: 128 columns of a chunk of a matrix's rows.
#pragma once

#include "cuda/dtype.h"
#include "cuda/linear_cka_large_blocks.h"

namespace fedkernels::cuda {

namespace {

constexpr int WIDTH = 128;                         // columns of a part: four for each lane
constexpr int MOST_CHUNKS = 32, LEAST_ROWS = 64;   // of the rows, in a part

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

}  // namespace

}  // namespace fedkernels::cuda

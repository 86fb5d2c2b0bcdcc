// Before the products: maxima, column sums, then z, which is x and y side by side, scaled and centred. A block works
// on a part: 128 columns of a chunk of a matrix's rows. It leaves its part of a sum in memory; the next kernel's
// blocks add the parts that they need, all in one order.
#include "cuda/dtype.h"
#include "cuda/linear_cka_blocks.h"

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

// What brings `largest` to [1, 2), or as near as a power of two does. 0 where it is infinite, so that NaN comes out.
template <typename T>
__device__ inline T scale_for(T largest) {
  T scale = 0;
  if (largest == 0) return 1;
  if (largest - largest == 0) power_of_two(-exponent_of(largest), &scale);
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

// Writes the matrices to z, whose rows are `pitch` apart, and their scales [problems, count].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    write_kernel(const CKAMatrices given, const T* maxima, const double* sums, T* z, int64_t pitch, double* scales) {
  SHARED(first_of, T[WIDTH]);
  SHARED(mean_of, T[WIDTH]);
  const Part part(given);
  const T scale = scale_for(part.largest(maxima));
  if (part.tile == 0 && part.chunk == 0 && threadIdx.x == 0) {
    scales[part.problem * given.count + part.matrix] = static_cast<double>(scale);
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
    for (int e = 0; e < 4; ++e) four.values[e] = (values[e] * scale - first[e]) - mean[e];
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

// ---- on the host ----

// Each part's maximum comes first in memory, then its column sums.
int64_t blocks_of(const CKAMatrices& given) { return given.problems * Parts(given).of_problem(); }

template <typename T>
const char* prepare(const CKAMatrices& given, T* z, double* scales, double* memory, Stream stream) {
  const int64_t blocks = blocks_of(given);
  if (!one_dimension(blocks)) return "too many matrices at once";
  T* const maxima = reinterpret_cast<T*>(memory);
  double* const sums = memory + blocks;
  int64_t pitch = 0;
  for (int i = 0; i < given.count; ++i) pitch += given.widths[i];
  const char* error = launch(shape_of(blocks), stream, maxima_kernel<T>, given, maxima);
  if (!error && given.centered) {
    error = launch(shape_of(blocks), stream, column_sums_kernel<T>, given, maxima, sums);
  }
  if (error) return error;
  return launch(shape_of(blocks), stream, write_kernel<T>, given, maxima, sums, z, pitch, scales);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_linear_cka_prepare_doubles(const fedkernels::cuda::CKAMatrices* given) {
  using namespace fedkernels::cuda;
  return blocks_of(*given) * (given->centered ? 1 + WIDTH : 1);
}

extern "C" const char* cuda_linear_cka_prepare(const fedkernels::cuda::CKAMatrices* given, void* z, double* scales,
                                               double* memory, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (given->problems == 0) return nullptr;
  return given->wide ? prepare(*given, static_cast<double*>(z), scales, memory, stream)
                     : prepare(*given, static_cast<float*>(z), scales, memory, stream);
}

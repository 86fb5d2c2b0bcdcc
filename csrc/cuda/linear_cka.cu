// With z = [x y], scaled and centred, all products are blocks of P = z'z, and both gradients are z M, where M is P with
// a factor for each of its four blocks. So a problem is two products of tiles, z'z above the diagonal and z M, and a
// block takes one problem after the other. z and P lie in device memory, padded with zeros to whole tiles, and are read
// through the second-level cache.
//
// Products run on the tensor cores in three parts: with a = high + low, both of 11 bits, ab is high high + high low +
// low high to 2^-22. What the tensor cores add up is kept short, for they do not round to the nearest: the sums of a
// chunk are added in float32.
#include "cuda/linear_cka.h"

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int DEPTH = 32;  // of a chunk: rows of z, or columns in the second product

// A block computes TILE x TILE sums at a time, a warp 32 x 8 OF_COLUMNS of them.
template <int TILE>
struct Tiles {
  static constexpr int DOWN = TILE / 32, ACROSS = WARPS / DOWN, OF_COLUMNS = TILE / ACROSS / 8;
  // A fragment is read from 4 rows of a chunk by 8 columns, or the reverse: at these pitches from 32 banks.
  static constexpr int PITCH = TILE + 8, LEFT_PITCH = DEPTH + 4;
  static constexpr int LEFT = TILE * LEFT_PITCH > DEPTH * PITCH ? TILE * LEFT_PITCH : DEPTH * PITCH;
  static constexpr int BUFFER = LEFT + DEPTH * PITCH;  // floats
};

struct Layout {
  int rows, x_width, width;  // padded; width is of z

  __host__ __device__ Layout(const CKAProblems& of, int tile)
      : rows(up(of.rows, tile)), x_width(up(of.x_width, tile)), width(x_width + up(of.y_width, tile)) {}
  static __host__ __device__ int up(int64_t count, int tile) {
    return static_cast<int>((count + tile - 1) / tile * tile);
  }
  __host__ __device__ int64_t floats() const { return static_cast<int64_t>(rows + width) * width; }
};

// The power of two that brings numbers up to `largest` below 2; 0 where that is infinite or NaN, so that NaN comes out.
__device__ inline float scale_for(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23 & 255);
  if (exponent == 255) return 0;
  const int of_scale = 254 - max(exponent, 1);
  return __uint_as_float(static_cast<unsigned>(max(of_scale, 1)) << 23);
}

// Writes x or y, scaled, centred and padded, to z. -> its scale. `first` and `mean` are shared memory, CKA_WIDTH each.
__device__ inline float prepare(const Array& source, int64_t start, int rows, int width, bool centered, float* z,
                                int padded_rows, int padded_width, int pitch, float* of_warps, float* first,
                                float* mean) {
  const int thread = threadIdx.x, entries = rows * width;
  float values[4], largest = 0;
  for (int i = 4 * thread; i < entries; i += 4 * THREADS) {
    read_four(values, source, start + i, entries - i);
#pragma unroll
    for (int e = 0; e < 4; ++e) largest = Greatest()(fabsf(values[e]), largest);
  }
  const float scale = scale_for(block_reduce(largest, of_warps, Greatest()));

  // The shift by the first row makes a constant column 0 to the last bit.
  for (int column = thread; column < width; column += THREADS) {
    float begin = 0;
    double total = 0;
    if (centered) {
      read_four(values, source, start + column, 1);
      begin = values[0] * scale;
      for (int row = 0; row < rows; ++row) {
        read_four(values, source, start + row * width + column, 1);
        total += static_cast<double>(values[0] * scale - begin);
      }
    }
    first[column] = begin;
    mean[column] = static_cast<float>(total / rows);
  }
  __syncthreads();

  const int fours = padded_width / 4;
  for (int i = thread; i < padded_rows * fours; i += THREADS) {
    const int row = i / fours, column = i % fours * 4, count = row < rows ? width - column : 0;
    read_four(values, source, start + row * width + column, count);
    Four<float> four;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      four.values[e] = e < count ? (values[e] * scale - first[column + e]) - mean[column + e] : 0;
    }
    *reinterpret_cast<Four<float>*>(z + row * pitch + column) = four;
  }
  return scale;
}

__device__ inline void split(float value, uint32_t* high, uint32_t* low) {
  *high = to_tf32(value);
  *low = __float_as_uint(value - __uint_as_float(*high)) & 0xffffe000;
}

// sums += factor(k) left[., k] right[k, .] over k < depth, whose chunks have one factor each. Rows of left are rows in
// memory (ROWS), or its columns are; rows of right are rows. All have one pitch.
template <int TILE, bool ROWS, typename Factor>
__device__ inline void multiply(const float* left, const float* right, int pitch, int depth, Factor factor,
                                float (&sums)[2][Tiles<TILE>::OF_COLUMNS][4]) {
  using T = Tiles<TILE>;
  float* const buffers = dynamic_shared<float>();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int first_row = warp % T::DOWN * 32, first_column = warp / T::DOWN * 8 * T::OF_COLUMNS;
  const auto fetch = [&](int chunk) {
    float* const to_left = buffers + chunk % 2 * T::BUFFER;
    float* const to_right = to_left + T::LEFT;
    const int start = chunk * DEPTH;
    for (int i = thread; i < DEPTH * TILE / 4; i += THREADS) {
      const int k = i / (TILE / 4), column = i % (TILE / 4) * 4;
      copy_async<16>(to_right + k * T::PITCH + column, right + (start + k) * pitch + column);
      if constexpr (ROWS) {
        const int row = i / (DEPTH / 4), of_row = i % (DEPTH / 4) * 4;
        copy_async<16>(to_left + row * T::LEFT_PITCH + of_row, left + row * pitch + start + of_row);
      } else {
        copy_async<16>(to_left + k * T::PITCH + column, left + (start + k) * pitch + column);
      }
    }
  };

  const int chunks = depth / DEPTH;
  __syncthreads();  // the tile before has been multiplied
  fetch(0);
  copy_async_commit();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_async_wait<0>();
    __syncthreads();  // the chunk is there, and the one before has been multiplied
    if (chunk + 1 < chunks) fetch(chunk + 1);
    copy_async_commit();

    const float* const of_left = buffers + chunk % 2 * T::BUFFER;
    const float* const of_right = of_left + T::LEFT;
    float short_sums[2][T::OF_COLUMNS][4] = {};
#pragma unroll(TILE == 64 ? 4 : 1)
    for (int k = 0; k < DEPTH; k += 8) {
      uint32_t high[2][4], low[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int row = first_row + 16 * m + g + r % 2 * 8, at = k + t + r / 2 * 4;
          split(of_left[ROWS ? row * T::LEFT_PITCH + at : at * T::PITCH + row], &high[m][r], &low[m][r]);
        }
      }
#pragma unroll
      for (int n = 0; n < T::OF_COLUMNS; ++n) {
        uint32_t right_high[2], right_low[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          split(of_right[(k + t + 4 * r) * T::PITCH + first_column + 8 * n + g], &right_high[r], &right_low[r]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma_tf32(short_sums[m][n], low[m], right_high);
          mma_tf32(short_sums[m][n], high[m], right_low);
          mma_tf32(short_sums[m][n], high[m], right_high);
        }
      }
    }
    const float by = factor(chunk * DEPTH);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < T::OF_COLUMNS; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[m][n][r] = __fmaf_rn(by, short_sums[m][n][r], sums[m][n][r]);
      }
    }
  }
}

// use(row, column, sum) for this thread's sums of a tile.
template <int TILE, typename Use>
__device__ inline void each_sum(const float (&sums)[2][Tiles<TILE>::OF_COLUMNS][4], Use use) {
  using T = Tiles<TILE>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < T::OF_COLUMNS; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        use(warp % T::DOWN * 32 + 16 * m + g + r / 2 * 8, (warp / T::DOWN * T::OF_COLUMNS + n) * 8 + 2 * t + r % 2,
            sums[m][n][r]);
      }
    }
  }
}

template <int TILE>
__global__ void __launch_bounds__(THREADS, TILE == 64 ? 2 : 1)
    linear_cka_kernel(const CKAProblems given, float* memory) {
  using T = Tiles<TILE>;
  SHARED(first, float[CKA_WIDTH]);
  SHARED(mean, float[CKA_WIDTH]);
  SHARED(largest_of, float[WARPS]);
  SHARED(sum_of, double[WARPS]);
  const Layout layout(given, TILE);
  const int rows = static_cast<int>(given.rows), width = layout.width;
  const int x_width = static_cast<int>(given.x_width), y_width = static_cast<int>(given.y_width);
  const int tiles = width / TILE, x_tiles = layout.x_width / TILE;
  const bool gradients = given.x_gradients || given.y_gradients;
  float* const z = memory + blockIdx.x * layout.floats();
  float* const products = z + static_cast<int64_t>(layout.rows) * width;

  for (int64_t problem = blockIdx.x; problem < given.problems; problem += gridDim.x) {
    const int64_t x_start = problem * rows * x_width, y_start = problem * rows * y_width;
    __syncthreads();  // the problem before has been read
    const float x_scale = prepare(given.x, x_start, rows, x_width, given.centered, z, layout.rows, layout.x_width,
                                  width, largest_of, first, mean);
    const float y_scale = prepare(given.y, y_start, rows, y_width, given.centered, z + layout.x_width, layout.rows,
                                  width - layout.x_width, width, largest_of, first, mean);
    __syncthreads();

    double xx = 0, cross = 0, yy = 0;
    for (int i = 0; i < tiles; ++i) {
      for (int j = i; j < tiles; ++j) {
        float sums[2][T::OF_COLUMNS][4] = {};
        multiply<TILE, false>(z + i * TILE, z + j * TILE, width, Layout::up(rows, DEPTH), [](int) { return 1.0f; },
                              sums);
        double squares = 0;
        each_sum<TILE>(sums, [&](int row, int column, float sum) {
          squares += static_cast<double>(sum) * static_cast<double>(sum);
          if (gradients) {
            const int of_row = i * TILE + row, of_column = j * TILE + column;
            products[of_row * width + of_column] = sum;
            if (i != j) products[of_column * width + of_row] = sum;
          }
        });
        if (i < x_tiles && j >= x_tiles) {
          cross += squares;
        } else {
          (i < x_tiles ? xx : yy) += i == j ? squares : 2 * squares;
        }
      }
    }
    xx = block_reduce(xx, sum_of, Sum());
    cross = block_reduce(cross, sum_of, Sum());
    yy = block_reduce(yy, sum_of, Sum());
    const bool zero = (xx == 0 || yy == 0) && xx + yy == xx + yy;  // beside NaN all is NaN
    const double norms = sqrt(xx) * sqrt(yy), value = zero ? 0 : cross / norms;
    if (threadIdx.x == 0) given.values[problem] = static_cast<float>(value);

    // d value / dx = 2 y (y'x) / norms - 2 value x (x'x) / xx, and so for y.
    const float of_cross = static_cast<float>(zero ? 0 : 2 / norms);
    const float of_xx = static_cast<float>(zero ? 0 : -2 * value / xx);
    const float of_yy = static_cast<float>(zero ? 0 : -2 * value / yy);
    for (int i = 0; i < layout.rows / TILE; ++i) {
      for (int j = 0; j < tiles; ++j) {
        const bool of_y = j >= x_tiles;
        float* const target = of_y ? given.y_gradients : given.x_gradients;
        if (!target) continue;
        const auto factor = [&](int k) { return (k >= layout.x_width) != of_y ? of_cross : of_y ? of_yy : of_xx; };
        float sums[2][T::OF_COLUMNS][4] = {};
        multiply<TILE, true>(z + i * TILE * width, products + j * TILE, width, width, factor, sums);
        const int64_t start = of_y ? y_start : x_start;
        const int columns = of_y ? y_width : x_width, first_column = (of_y ? j - x_tiles : j) * TILE;
        const float scale = of_y ? y_scale : x_scale;
        each_sum<TILE>(sums, [&](int row, int column, float sum) {
          row += i * TILE;
          column += first_column;
          if (row < rows && column < columns) target[start + row * columns + column] = sum * scale;
        });
      }
    }
  }
}

int tile_for(const CKAProblems& of) { return of.x_width > 64 || of.y_width > 64 ? 128 : 64; }

int64_t blocks_for(const CKAProblems& of) {
  const int64_t most = static_cast<int64_t>(multiprocessors()) * (tile_for(of) == 64 ? 2 : 1);
  return of.problems < most ? of.problems : most;
}

template <int TILE>
const char* run(const CKAProblems& problems, float* memory, Stream stream) {
  const Shape shape = {static_cast<unsigned>(blocks_for(problems)), THREADS, 2 * sizeof(float) * Tiles<TILE>::BUFFER};
  return launch(shape, stream, linear_cka_kernel<TILE>, problems, memory);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_linear_cka_floats(const fedkernels::cuda::CKAProblems* problems) {
  using namespace fedkernels::cuda;
  return blocks_for(*problems) * Layout(*problems, tile_for(*problems)).floats();
}

extern "C" const char* cuda_linear_cka(const fedkernels::cuda::CKAProblems* problems, float* memory,
                                       fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (problems->problems == 0) return nullptr;
  return tile_for(*problems) == 64 ? run<64>(*problems, memory, stream) : run<128>(*problems, memory, stream);
}

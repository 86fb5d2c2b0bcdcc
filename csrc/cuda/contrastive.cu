// As in fused attention: a block keeps a tile of rows in shared memory, tiles of columns stream past it in two buffers,
// and the logits live in registers. The second product takes the tile of columns, which is there, as its values: so loss
// and gradient come out of one pass. Columns are shared out among blocks where the rows alone would not fill the device;
// each block writes its part of the sums, and a second kernel joins them in order.
//
// A block has 8 warps, 4 down the rows and 2 across: for the logits across the tile's columns, for the gradient across its
// width. Weights go from the one to the other through shared memory, rounded to the inputs' dtype.
#include "cuda/contrastive.h"

#include "cuda/contrastive_join.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;
// Weights of the second pass are as small as 1 / columns: scaled, float16 holds them as normal numbers.
constexpr float WEIGHT_SCALE = 4096;

template <int WIDTH>  // the largest width
struct Tiles {
  // Registers: the gradient takes 16 * OF_ROWS * WIDTH / 2 / 32 <= 128 of each thread.
  static constexpr int OF_ROWS = WIDTH <= 256 ? 2 : 1;       // tiles of 16 rows in a warp
  static constexpr int ROWS = 4 * 16 * OF_ROWS;              // in a block
  static constexpr int COLUMNS = WIDTH <= 256 ? 64 : 32;     // at a time
  static constexpr int OF_COLUMNS = COLUMNS / 16;            // tiles of 8 columns of logits in a warp
  static constexpr int OF_WIDTH = WIDTH / 16;                // tiles of 8 columns of the gradient in a warp
  static constexpr int WEIGHT_PITCH = COLUMNS + 8;           // 16 bytes more keep the rows of a matrix in other banks
};

inline __host__ __device__ int pitch_of(int64_t width) { return static_cast<int>(up(width, 16)) + 8; }

template <int WIDTH>
size_t shared_bytes(int64_t width) {
  using T = Tiles<WIDTH>;
  const size_t halves = static_cast<size_t>(T::ROWS + 2 * T::COLUMNS) * pitch_of(width) + T::ROWS * T::WEIGHT_PITCH;
  return halves * 2 + 3 * T::ROWS * sizeof(float);
}

struct OfBFloat {
  static __device__ uint32_t pack(float first, float second) { return pack_bfloat(first, second); }
  static __device__ float wide(uint16_t bits) { return bfloat_to_float(bits); }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bfloat(sums, a, b);
  }
};
struct OfHalf {
  static __device__ uint32_t pack(float first, float second) { return pack_half(first, second); }
  static __device__ float wide(uint16_t bits) { return half_to_float(bits); }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_half(sums, a, b);
  }
};

using Halves = Arguments<uint16_t, float>;

// Rows first to first + COUNT of a matrix to shared memory; 0 beyond its end and its width.
template <int COUNT>
__device__ inline void fetch(uint16_t* tile, int pitch, const uint16_t* source, int first, int count, int width,
                             bool vectors) {
  const int filled = static_cast<int>(up(width, 16));
  if (vectors) {
    const int chunks = filled / 8;
    for (int index = threadIdx.x; index < COUNT * chunks; index += THREADS) {
      const int row = index / chunks, column = index % chunks * 8;
      const bool inside = first + row < count && column < width;
      const uint16_t* from = inside ? source + static_cast<int64_t>(first + row) * width + column : source;
      copy_async<16>(tile + row * pitch + column, from, inside ? 16 : 0);
    }
  } else {
    for (int index = threadIdx.x; index < COUNT * filled; index += THREADS) {
      const int row = index / filled, column = index % filled;
      const bool inside = first + row < count && column < width;
      tile[row * pitch + column] = inside ? source[static_cast<int64_t>(first + row) * width + column] : uint16_t(0);
    }
  }
}

template <typename Precision, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1) contrastive_kernel(Halves pass) {
  using T = Tiles<WIDTH>;
  const int pitch = pitch_of(pass.width), depth = static_cast<int>(up(pass.width, 16));
  uint16_t* const rows = dynamic_shared<uint16_t>();
  uint16_t* const columns = rows + T::ROWS * pitch;
  uint16_t* const weights = columns + 2 * T::COLUMNS * pitch;
  float* const largest_of = reinterpret_cast<float*>(weights + T::ROWS * T::WEIGHT_PITCH);  // [2, ROWS]
  float* const positive_logit = largest_of + 2 * T::ROWS;                                   // [ROWS]

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp % 4, across = warp / 4;
  const int g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * T::ROWS, own_row = down * 16 * T::OF_ROWS;
  const int first_tile = blockIdx.y * pass.tiles_of_part;
  const int all_tiles = (pass.column_count + T::COLUMNS - 1) / T::COLUMNS;
  const int tiles = min(pass.tiles_of_part, all_tiles - first_tile);
  const int half_width = static_cast<int>(up((depth + 1) / 2, 16));  // of the gradient, to each warp across

  float gradient[T::OF_ROWS][T::OF_WIDTH][4] = {};
  float largest[T::OF_ROWS][2], total[T::OF_ROWS][2] = {};  // of rows g and g + 8
  float given_largest[T::OF_ROWS][2] = {}, given_share[T::OF_ROWS][2] = {};
#pragma unroll
  for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[m][h] = lowest<float>();
      const int row = first_row + own_row + m * 16 + h * 8 + g;
      if (pass.row_share && row < pass.row_count && pass.given) {
        given_largest[m][h] = pass.row_largest[row];
        given_share[m][h] = pass.row_share[row] * WEIGHT_SCALE;
      }
    }
  }
  for (int row = threadIdx.x; row < T::ROWS; row += THREADS) positive_logit[row] = 0;

  fetch<T::ROWS>(rows, pitch, pass.rows, first_row, pass.row_count, pass.width, pass.vectors);
  fetch<T::COLUMNS>(columns, pitch, pass.columns, first_tile * T::COLUMNS, pass.column_count, pass.width, pass.vectors);
  copy_async_commit();

  for (int index = 0; index < tiles; ++index) {
    const int first_column = (first_tile + index) * T::COLUMNS;
    const uint16_t* const tile = columns + index % 2 * T::COLUMNS * pitch;
    if (index + 1 < tiles) {
      fetch<T::COLUMNS>(columns + (index + 1) % 2 * T::COLUMNS * pitch, pitch, pass.columns,
                        first_column + T::COLUMNS, pass.column_count, pass.width, pass.vectors);
    }
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();

    // Logits: rows of the warp times its half of the tile's columns.
    float logits[T::OF_ROWS][T::OF_COLUMNS][4] = {};
    const int half_tile = across * (T::COLUMNS / 2);
    for (int k = 0; k < depth; k += 16) {
      uint32_t a[T::OF_ROWS][4];
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
        load_matrices(a[m], rows + (own_row + m * 16 + lane % 16) * pitch + k + lane / 16 * 8);
      }
#pragma unroll
      for (int n = 0; n < T::OF_COLUMNS; n += 2) {
        uint32_t b[4];
        load_matrices(b, tile + (half_tile + n * 8 + lane / 16 * 8 + lane % 8) * pitch + k + lane / 8 % 2 * 8);
        const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < T::OF_ROWS; ++m) {
          Precision::multiply(logits[m][n], a[m], left);
          Precision::multiply(logits[m][n + 1], a[m], right);
        }
      }
    }

    // What does not count, and each row's positive.
#pragma unroll
    for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_block = own_row + m * 16 + h * 8 + g, row = first_row + in_block;
        const int positive = positive_of(pass, row);
#pragma unroll
        for (int n = 0; n < T::OF_COLUMNS; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = first_column + half_tile + n * 8 + 2 * t + e;
            float& logit = logits[m][n][2 * h + e];
            if (column == positive) positive_logit[in_block] = logit;
            if (column >= pass.column_count || (pass.leave_out_self && column == row)) {
              logit = __uint_as_float(0xff800000);  // -inf
            }
          }
        }
      }
    }

    float factor[T::OF_ROWS][2];
    if (!pass.given) {
      // The largest so far, by both warps across; what was summed before is scaled to it.
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = lowest<float>();
#pragma unroll
          for (int n = 0; n < T::OF_COLUMNS; ++n) {
            top = fmaxf(top, fmaxf(logits[m][n][2 * h], logits[m][n][2 * h + 1]));
          }
          top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
          top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
          if (t == 0) largest_of[across * T::ROWS + own_row + m * 16 + h * 8 + g] = top;
        }
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int in_block = own_row + m * 16 + h * 8 + g;
          const float top = fmaxf(largest[m][h], fmaxf(largest_of[in_block], largest_of[T::ROWS + in_block]));
          factor[m][h] = exp2f((largest[m][h] - top) * pass.scale);
          largest[m][h] = top;
          total[m][h] *= factor[m][h];
        }
      }
    }

    // Weights, in place of the logits.
#pragma unroll
    for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_block = own_row + m * 16 + h * 8 + g;
#pragma unroll
        for (int n = 0; n < T::OF_COLUMNS; ++n) {
          float values[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float logit = logits[m][n][2 * h + e];
            if (!pass.given) {
              values[e] = exp2f((logit - largest[m][h]) * pass.scale);
              total[m][h] += values[e];
            } else {
              values[e] = 0;
              if (pass.row_share) values[e] = exp2f((logit - given_largest[m][h]) * pass.scale) * given_share[m][h];
              const int column = first_column + half_tile + n * 8 + 2 * t + e;
              if (pass.column_share && column < pass.column_count) {
                values[e] += exp2f((logit - pass.column_largest[column]) * pass.scale) *
                             (pass.column_share[column] * WEIGHT_SCALE);
              }
            }
          }
          if (pass.gradient) {
            *reinterpret_cast<uint32_t*>(weights + in_block * T::WEIGHT_PITCH + half_tile + n * 8 + 2 * t) =
                Precision::pack(values[0], values[1]);
          }
        }
      }
    }

    if (pass.gradient) {
      __syncthreads();
      if (!pass.given) {
#pragma unroll
        for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
          for (int n = 0; n < T::OF_WIDTH; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) gradient[m][n][e] *= factor[m][e / 2];
          }
        }
      }
      // Gradient: weights of the warp's rows times its half of the tile's width.
#pragma unroll
      for (int k = 0; k < T::COLUMNS; k += 16) {
        uint32_t a[T::OF_ROWS][4];
#pragma unroll
        for (int m = 0; m < T::OF_ROWS; ++m) {
          load_matrices(a[m], weights + (own_row + m * 16 + lane % 16) * T::WEIGHT_PITCH + k + lane / 16 * 8);
        }
#pragma unroll
        for (int n = 0; n < T::OF_WIDTH; n += 2) {
          const int column = across * half_width + n * 8;
          if (n * 8 < half_width && column < depth) {
            uint32_t b[4];
            load_matrices_transposed(b, tile + (k + lane % 16) * pitch + column + lane / 16 * 8);
            const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
            for (int m = 0; m < T::OF_ROWS; ++m) {
              Precision::multiply(gradient[m][n], a[m], left);
              Precision::multiply(gradient[m][n + 1], a[m], right);
            }
          }
        }
      }
    }
    __syncthreads();  // the tile's buffer and the weights have been read
  }

  // This part's sums.
  const int64_t part = static_cast<int64_t>(blockIdx.y) * pass.row_count;
#pragma unroll
  for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_block = own_row + m * 16 + h * 8 + g, row = first_row + in_block;
      float sum = total[m][h];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (t == 0) largest_of[across * T::ROWS + in_block] = sum;
      __syncthreads();
      if (across == 0 && t == 0 && row < pass.row_count && !pass.given) {
        pass.largest[part + row] = largest[m][h];
        pass.total[part + row] = largest_of[in_block] + largest_of[T::ROWS + in_block];
        pass.positive[part + row] = positive_logit[in_block];
      }
      if (!pass.gradient || row >= pass.row_count) continue;
#pragma unroll
      for (int n = 0; n < T::OF_WIDTH; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = across * half_width + n * 8 + 2 * t + e;
          if (n * 8 < half_width && column < pass.width) {
            pass.gradient[(part + row) * pass.width + column] = gradient[m][n][2 * h + e];
          }
        }
      }
    }
  }
}

// One block: the sum of all losses, or their mean.
constexpr int SUM_THREADS = 1024;
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(Array losses, int64_t count, double divisor, Array result) {
  SHARED(of_warps, double[SUM_THREADS / 32]);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) sum += read_one(losses, i);
  sum = block_reduce(sum, of_warps, Sum());
  if (threadIdx.x == 0) write_one(result, 0, sum / divisor);
}

// One block. A weight that is not finite stays what it is.
template <typename Number>
__global__ void __launch_bounds__(SUM_THREADS) weights_kernel(const double* given, int64_t count, Number* weights) {
  SHARED(of_warps, double[SUM_THREADS / 32]);
  double largest = 0;
  for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) {
    const double size = fabs(given[i]);
    if (size < INFINITY) largest = fmax(largest, size);
  }
  largest = block_reduce(largest, of_warps, Greatest());
  const double unit = largest > 0 ? largest : 1;
  for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) weights[i] = static_cast<Number>(given[i] / unit);
  if (threadIdx.x == 0) weights[count] = static_cast<Number>(unit);
}

template <int WIDTH>
int parts_for(int64_t row_count, int64_t column_count) {
  using T = Tiles<WIDTH>;
  return parts_of(up(row_count, T::ROWS) / T::ROWS, up(column_count, T::COLUMNS) / T::COLUMNS);
}

template <typename Precision, int WIDTH>
const char* run(const ContrastivePass& given, void* memory, Stream stream) {
  using T = Tiles<WIDTH>;
  Halves pass = arguments_of<uint16_t, float>(given, T::COLUMNS, parts_for<WIDTH>(given.row_count, given.column_count),
                                              memory);
  pass.weight_scale = WEIGHT_SCALE;
  const unsigned row_blocks = static_cast<unsigned>((pass.row_count + T::ROWS - 1) / T::ROWS);
  const Shape shape = {dim3(row_blocks, static_cast<unsigned>(pass.parts)), dim3(THREADS),
                       shared_bytes<WIDTH>(given.width)};
  if (const char* error = launch(shape, stream, contrastive_kernel<Precision, WIDTH>, pass)) return error;
  return join<Precision>(pass, given, stream);
}

// The widest tiles that fit: those for 512 columns need the least shared memory at any width.
template <typename Precision>
const char* run(const ContrastivePass& pass, void* memory, Stream stream) {
  const size_t limit = shared_limit();
  if (pass.width <= 128 && shared_bytes<128>(pass.width) <= limit) return run<Precision, 128>(pass, memory, stream);
  if (pass.width <= 256 && shared_bytes<256>(pass.width) <= limit) return run<Precision, 256>(pass, memory, stream);
  return run<Precision, 512>(pass, memory, stream);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" bool cuda_contrastive_fits(int64_t width) {
  using namespace fedkernels::cuda;
  return width <= 512 && shared_bytes<512>(width) <= shared_limit();
}

extern "C" int64_t cuda_contrastive_memory(int64_t row_count, int64_t column_count, int64_t width, bool gradient) {
  using namespace fedkernels::cuda;
  int64_t most = 0;
  for (const int64_t parts : {parts_for<128>(row_count, column_count), parts_for<256>(row_count, column_count),
                              parts_for<512>(row_count, column_count)}) {
    const int64_t entries = numbers_of_parts(parts, row_count, width, gradient);
    most = entries > most ? entries : most;
  }
  return most * static_cast<int64_t>(sizeof(float));
}

extern "C" const char* cuda_contrastive(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                        fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (!cuda_contrastive_fits(pass->width)) return "the width is too large for this device";
  return pass->rows.dtype == fedkernels::DType::bf16 ? run<OfBFloat>(*pass, memory, stream)
                                                     : run<OfHalf>(*pass, memory, stream);
}

extern "C" const char* cuda_contrastive_sum(const fedkernels::Array* losses, int64_t count, double divisor,
                                            const fedkernels::Array* result, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  return launch({dim3(1), dim3(SUM_THREADS)}, stream, sum_kernel, *losses, count, divisor, *result);
}

extern "C" const char* cuda_contrastive_weights(const double* given, int64_t count, const fedkernels::Array* weights,
                                                fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  const Shape shape = {dim3(1), dim3(SUM_THREADS)};
  return weights->dtype == fedkernels::DType::f64
             ? launch(shape, stream, weights_kernel<double>, given, count, static_cast<double*>(weights->data))
             : launch(shape, stream, weights_kernel<float>, given, count, static_cast<float*>(weights->data));
}

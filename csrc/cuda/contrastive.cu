// As in fused attention: a block keeps a tile of rows in shared memory, tiles of columns stream past it in two buffers,
// and the logits live in registers. The second product takes the tile of columns, which is there, as its values: so
// loss and gradient come out of one pass. Columns are shared out among blocks where the rows alone would not fill the
// device; each block writes its part of the sums, and a second kernel joins them in order.
//
// A block has 8 warps, 4 down the rows and 2 across: for the logits across the tile's columns, for the gradient across
// its width. Weights go from the one to the other through shared memory, rounded to the inputs' dtype.
//
// float32 is rounded to tf32 where torch allows it. A fragment of 8 columns in tf32 lies in shared memory as one of 16
// columns in half precision does: 32 bytes of each row. Only the values, whose fragments are transposed, differ.
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

template <typename Entry, int WIDTH>  // the largest width
struct Tiles {
  static constexpr int LANES = 16 / sizeof(Entry);           // entries in 16 bytes: half the depth of a fragment
  // Registers: the gradient takes 16 * OF_ROWS * WIDTH / 2 / 32 <= 128 of each thread.
  static constexpr int OF_ROWS = WIDTH <= 256 ? 2 : 1;       // tiles of 16 rows in a warp
  static constexpr int ROWS = 4 * 16 * OF_ROWS;              // in a block
  static constexpr int MOST = (32 << 10) / (WIDTH * sizeof(Entry));
  static constexpr int COLUMNS = MOST < 64 ? MOST : 64;      // at a time
  static constexpr int OF_COLUMNS = COLUMNS / 16;            // tiles of 8 columns of logits in a warp
  static constexpr int OF_WIDTH = WIDTH / 16;                // tiles of 8 columns of the gradient in a warp
  static constexpr int WEIGHT_PITCH = COLUMNS + LANES;       // 16 bytes more keep the rows of a matrix in other banks
};

template <typename Entry>
inline __host__ __device__ int pitch_of(int64_t width) {
  return static_cast<int>(up(width, 16) + 16 / sizeof(Entry));
}

template <typename Entry, int WIDTH>
size_t shared_bytes(int64_t width) {
  using T = Tiles<Entry, WIDTH>;
  const size_t entries = static_cast<size_t>(T::ROWS + 2 * T::COLUMNS) * pitch_of<Entry>(width);
  return (entries + T::ROWS * T::WEIGHT_PITCH) * sizeof(Entry) + 3 * T::ROWS * sizeof(float);
}

// What the precisions do in their own way:
//   rounded: an entry as it is multiplied
//   put: a thread's two weights among 8, at columns 2t and 2t + 1
//   load_values: the two fragments b of 16 columns of values, their rows in the order that `put` gives the weights
struct OfHalves {
  using Entry = uint16_t;
  static __device__ uint16_t rounded(uint16_t bits) { return bits; }
  static __device__ void load_values(uint32_t (&b)[4], const uint16_t* values, int pitch, int lane) {
    load_matrices_transposed(b, values + lane % 16 * pitch + lane / 16 * 8);
  }
};
struct OfBFloat : OfHalves {
  static __device__ float wide(uint16_t bits) { return bfloat_to_float(bits); }
  static __device__ void put(uint16_t* weights, int t, float first, float second) {
    *reinterpret_cast<uint32_t*>(weights + 2 * t) = pack_bfloat(first, second);
  }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bfloat(sums, a, b);
  }
};
struct OfHalf : OfHalves {
  static __device__ float wide(uint16_t bits) { return half_to_float(bits); }
  static __device__ void put(uint16_t* weights, int t, float first, float second) {
    *reinterpret_cast<uint32_t*>(weights + 2 * t) = pack_half(first, second);
  }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_half(sums, a, b);
  }
};
struct OfTF32 {
  using Entry = float;
  static __device__ float rounded(float value) { return __uint_as_float(to_tf32(value)); }
  static __device__ float wide(float value) { return rounded(value); }
  // Even columns first: so the values' rows that a warp reads at a time are every other one, from 32 banks.
  static __device__ void put(float* weights, int t, float first, float second) {
    weights[t] = rounded(first);
    weights[t + 4] = rounded(second);
  }
  static __device__ void load_values(uint32_t (&b)[4], const float* values, int pitch, int lane) {
    const float* const from = values + lane % 4 * 2 * pitch + lane / 4;
    b[0] = __float_as_uint(from[0]);
    b[1] = __float_as_uint(from[pitch]);
    b[2] = __float_as_uint(from[8]);
    b[3] = __float_as_uint(from[pitch + 8]);
  }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_tf32(sums, a, b);
  }
};

// Rows first to first + COUNT of a matrix to shared memory; 0 beyond its end and its width.
template <typename Precision, int COUNT, typename Entry>
__device__ inline void fetch(Entry* tile, int pitch, const Entry* source, int first, int count, int width,
                             bool vectors) {
  constexpr int LANES = 16 / sizeof(Entry);
  const int filled = static_cast<int>(up(width, 16));
  if (vectors) {
    const int chunks = filled / LANES;
    for (int index = threadIdx.x; index < COUNT * chunks; index += THREADS) {
      const int row = index / chunks, column = index % chunks * LANES;
      const bool inside = first + row < count && column < width;
      const Entry* from = inside ? source + static_cast<int64_t>(first + row) * width + column : source;
      copy_async<16>(tile + row * pitch + column, from, inside ? 16 : 0);
    }
  } else {
    for (int index = threadIdx.x; index < COUNT * filled; index += THREADS) {
      const int row = index / filled, column = index % filled;
      const bool inside = first + row < count && column < width;
      tile[row * pitch + column] =
          inside ? Precision::rounded(source[static_cast<int64_t>(first + row) * width + column]) : Entry(0);
    }
  }
}

// Rounds to tf32 what this thread fetched, once it is there. Else each fragment would be rounded that is made of it.
template <int COUNT>
__device__ inline void round_fetched(float* tile, int pitch, int width) {
  const int chunks = static_cast<int>(up(width, 16)) / 4;
  for (int index = threadIdx.x; index < COUNT * chunks; index += THREADS) {
    Four<float>* const at = reinterpret_cast<Four<float>*>(tile + index / chunks * pitch + index % chunks * 4);
    Four<float> four = *at;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.values[e] = OfTF32::rounded(four.values[e]);
    *at = four;
  }
}

template <typename Precision, int WIDTH>
__global__ void __launch_bounds__(THREADS, 1)
    contrastive_kernel(Arguments<typename Precision::Entry, float> pass) {
  using Entry = typename Precision::Entry;
  using T = Tiles<Entry, WIDTH>;
  const int pitch = pitch_of<Entry>(pass.width), depth = static_cast<int>(up(pass.width, 16));
  Entry* const rows = dynamic_shared<Entry>();
  Entry* const columns = rows + T::ROWS * pitch;
  Entry* const weights = columns + 2 * T::COLUMNS * pitch;
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

  const auto fetch_tile = [&](int index) {
    fetch<Precision, T::COLUMNS>(columns + index % 2 * T::COLUMNS * pitch, pitch, pass.columns,
                                 (first_tile + index) * T::COLUMNS, pass.column_count, pass.width, pass.vectors);
  };
  fetch<Precision, T::ROWS>(rows, pitch, pass.rows, first_row, pass.row_count, pass.width, pass.vectors);
  fetch_tile(0);
  copy_async_commit();

  for (int index = 0; index < tiles; ++index) {
    const int first_column = (first_tile + index) * T::COLUMNS;
    Entry* const tile = columns + index % 2 * T::COLUMNS * pitch;
    if (index + 1 < tiles) fetch_tile(index + 1);
    copy_async_commit();
    copy_async_wait<1>();
    if constexpr (sizeof(Entry) == 4) {
      if (pass.vectors) {
        if (index == 0) round_fetched<T::ROWS>(rows, pitch, pass.width);
        round_fetched<T::COLUMNS>(tile, pitch, pass.width);
      }
    }
    __syncthreads();

    // Logits: rows of the warp times its half of the tile's columns.
    float logits[T::OF_ROWS][T::OF_COLUMNS][4] = {};
    const int half_tile = across * (T::COLUMNS / 2);
    for (int k = 0; k < depth; k += 2 * T::LANES) {
      uint32_t a[T::OF_ROWS][4];
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
        load_matrices(a[m], rows + (own_row + m * 16 + lane % 16) * pitch + k + lane / 16 * T::LANES);
      }
      const Entry* const from = tile + (half_tile + lane % 8) * pitch + k + lane / 8 % 2 * T::LANES;
      if constexpr (T::OF_COLUMNS == 1) {
        uint32_t b[2];
        load_matrices(b, from);
#pragma unroll
        for (int m = 0; m < T::OF_ROWS; ++m) Precision::multiply(logits[m][0], a[m], b);
      } else {
#pragma unroll
        for (int n = 0; n < T::OF_COLUMNS; n += 2) {
          uint32_t b[4];
          load_matrices(b, from + (n * 8 + lane / 16 * 8) * pitch);
          const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
          for (int m = 0; m < T::OF_ROWS; ++m) {
            Precision::multiply(logits[m][n], a[m], left);
            Precision::multiply(logits[m][n + 1], a[m], right);
          }
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
            Precision::put(weights + in_block * T::WEIGHT_PITCH + half_tile + n * 8, t, values[0], values[1]);
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
      for (int k = 0; k < T::COLUMNS; k += 2 * T::LANES) {
        uint32_t a[T::OF_ROWS][4];
#pragma unroll
        for (int m = 0; m < T::OF_ROWS; ++m) {
          load_matrices(a[m], weights + (own_row + m * 16 + lane % 16) * T::WEIGHT_PITCH + k + lane / 16 * T::LANES);
        }
#pragma unroll
        for (int n = 0; n < T::OF_WIDTH; n += 2) {
          const int column = across * half_width + n * 8;
          if (n * 8 < half_width && column < depth) {
            uint32_t b[4];
            Precision::load_values(b, tile + k * pitch + column, pitch, lane);
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

template <typename Entry, int WIDTH>
int parts_for(int64_t row_count, int64_t column_count) {
  using T = Tiles<Entry, WIDTH>;
  return parts_of(up(row_count, T::ROWS) / T::ROWS, up(column_count, T::COLUMNS) / T::COLUMNS);
}

template <typename Precision, int WIDTH>
const char* run(const ContrastivePass& given, void* memory, Stream stream) {
  using Entry = typename Precision::Entry;
  using T = Tiles<Entry, WIDTH>;
  const int parts = parts_for<Entry, WIDTH>(given.row_count, given.column_count);
  Arguments<Entry, float> pass = arguments_of<Entry, float>(given, T::COLUMNS, parts, memory);
  pass.weight_scale = WEIGHT_SCALE;
  const unsigned row_blocks = static_cast<unsigned>((pass.row_count + T::ROWS - 1) / T::ROWS);
  const Shape shape = {dim3(row_blocks, static_cast<unsigned>(pass.parts)), dim3(THREADS),
                       shared_bytes<Entry, WIDTH>(given.width)};
  if (const char* error = launch(shape, stream, contrastive_kernel<Precision, WIDTH>, pass)) return error;
  return join<Precision>(pass, given, stream);
}

// The widest tiles that fit: those for 512 columns need the least shared memory at any width.
template <typename Precision>
const char* run(const ContrastivePass& pass, void* memory, Stream stream) {
  using Entry = typename Precision::Entry;
  const int64_t width = pass.width;
  const size_t limit = shared_limit();
  if (width <= 128 && shared_bytes<Entry, 128>(width) <= limit) return run<Precision, 128>(pass, memory, stream);
  if (width <= 256 && shared_bytes<Entry, 256>(width) <= limit) return run<Precision, 256>(pass, memory, stream);
  return run<Precision, 512>(pass, memory, stream);
}

template <typename Entry>
int64_t most_parts(int64_t row_count, int64_t column_count) {
  const int of_128 = parts_for<Entry, 128>(row_count, column_count);
  const int of_256 = parts_for<Entry, 256>(row_count, column_count);
  const int of_512 = parts_for<Entry, 512>(row_count, column_count);
  const int most = of_128 > of_256 ? of_128 : of_256;
  return most > of_512 ? most : of_512;
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" bool cuda_contrastive_fits(int64_t width, bool tf32) {
  using namespace fedkernels::cuda;
  const size_t bytes = tf32 ? shared_bytes<float, 512>(width) : shared_bytes<uint16_t, 512>(width);
  return width <= 512 && bytes <= shared_limit();
}

extern "C" int64_t cuda_contrastive_memory(int64_t row_count, int64_t column_count, int64_t width, bool gradient,
                                           bool tf32) {
  using namespace fedkernels::cuda;
  const int64_t parts =
      tf32 ? most_parts<float>(row_count, column_count) : most_parts<uint16_t>(row_count, column_count);
  return numbers_of_parts(parts, row_count, width, gradient) * static_cast<int64_t>(sizeof(float));
}

extern "C" const char* cuda_contrastive(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                        fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  const fedkernels::DType dtype = pass->rows.dtype;
  if (!cuda_contrastive_fits(pass->width, dtype == fedkernels::DType::f32)) {
    return "the width is too large for this device";
  }
  if (dtype == fedkernels::DType::f32) return run<OfTF32>(*pass, memory, stream);
  return dtype == fedkernels::DType::bf16 ? run<OfBFloat>(*pass, memory, stream) : run<OfHalf>(*pass, memory, stream);
}

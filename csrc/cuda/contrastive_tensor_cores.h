// The kernel of the contrastive passes on the tensor cores, for one precision, one width and one kind of pass: all that
// could be asked in its loop is a template parameter.
//
// As in fused attention: a block keeps a tile of rows in shared memory, tiles of columns stream past it in two buffers,
// and the logits live in registers. The second product takes the tile of columns, which is there, as its values: so
// loss and gradient come out of one pass. Columns are shared out among blocks where the rows alone would not fill the
// device; each block writes its part of the sums, and a second kernel joins them in order.
//
// The warps of a block stand in a grid: for the logits across the tile's columns, for the gradient across its width.
// Weights go from the one to the other through shared memory, rounded to the inputs' dtype.
//
// Rows lie in memory with exactly WIDTH entries, from a multiple of 16 bytes on; contrastive_launch.h copies those
// that do not. The end of the matrices, the excluded diagonal and the positives are met in few tiles: one test for the
// whole block finds these.
#pragma once

#include "cuda/contrastive_join.h"
#include "cuda/contrastive_precisions.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

// Weights of the second pass are as small as 1 / columns: scaled, float16 holds them as normal numbers.
constexpr float WEIGHT_SCALE = 4096;

namespace {

enum class PassKind {
  sums,               // the sums of each row
  sums_and_gradient,  // the sums, and each row's gradient by them
  given_columns,      // the gradient of each row by the sums of the columns
  given_both,         // the gradient by the sums of the row and those of the columns
};

// Tiles of a block: DOWN x ACROSS warps, OF_ROWS times 16 rows a warp, COLUMNS at a time. The gradient takes
// 2 OF_ROWS WIDTH / ACROSS <= 128 registers of each thread.
template <typename PrecisionOfTiles, int WIDTH_, int DOWN_, int ACROSS_, int OF_ROWS_, int COLUMNS_>
struct Tiles {
  using Precision = PrecisionOfTiles;
  using Entry = typename Precision::Entry;
  static constexpr int WIDTH = WIDTH_, DOWN = DOWN_, ACROSS = ACROSS_, OF_ROWS = OF_ROWS_, COLUMNS = COLUMNS_;
  static constexpr int THREADS = 32 * DOWN * ACROSS;
  static constexpr int LANES = 16 / sizeof(Entry);            // entries in 16 bytes: half the depth of a fragment
  static constexpr int DEPTH = 2 * LANES;                     // of a fragment
  static constexpr int ROWS = DOWN * 16 * OF_ROWS;            // in a block
  static constexpr int OF_COLUMNS = COLUMNS / (8 * ACROSS);   // tiles of 8 columns of logits in a warp
  static constexpr int OF_WIDTH = WIDTH / (8 * ACROSS);       // tiles of 8 columns of the gradient in a warp
  static constexpr int PITCH = WIDTH + LANES;                 // 16 bytes more keep the rows of a matrix in other banks
  static constexpr int WEIGHT_PITCH = COLUMNS + LANES;
  static constexpr size_t BYTES = sizeof(Entry) * ((ROWS + 2 * COLUMNS) * PITCH + ROWS * WEIGHT_PITCH) +
                                  sizeof(float) * ((ACROSS + 1) * ROWS + 4 * COLUMNS);
  static_assert(OF_COLUMNS == 1 || OF_COLUMNS % 2 == 0);
  static_assert(OF_WIDTH % 2 == 0 && COLUMNS % DEPTH == 0 && 4 * OF_ROWS * OF_WIDTH <= 128);
};

// Copies rows of a matrix to shared memory: each thread its 16 bytes of every ROWS_AT_ONCE-th row.
template <typename T, int COUNT>
struct Copy {
  using Entry = typename T::Entry;
  static constexpr int CHUNKS = T::WIDTH / T::LANES, OF_ROW = CHUNKS < 32 ? CHUNKS : 32;
  static constexpr int ROWS_AT_ONCE = T::THREADS / OF_ROW;
  static_assert(CHUNKS % OF_ROW == 0 && COUNT % ROWS_AT_ONCE == 0);

  // `source` is at the first of the rows, of which `valid` are in the matrix (or fewer than none): others become 0.
  static __device__ void start(Entry* tile, const Entry* source, int valid) {
    const int row = threadIdx.x / OF_ROW, column = threadIdx.x % OF_ROW * T::LANES;
    const Entry* const from = source + row * T::WIDTH + column;
    Entry* const to = tile + row * T::PITCH + column;
#pragma unroll
    for (int i = 0; i < COUNT; i += ROWS_AT_ONCE) {
      const int bytes = i + row < valid ? 16 : 0;
#pragma unroll
      for (int j = 0; j < CHUNKS; j += OF_ROW) {
        copy_async<16>(to + i * T::PITCH + j * T::LANES, from + i * T::WIDTH + j * T::LANES, bytes);
      }
    }
  }
};

// Does a tile of columns hold one of `count` columns from `first` on?
template <typename T>
__device__ inline bool tile_meets(int first_column, int first, int count) {
  return first < first_column + T::COLUMNS && first_column < first + count;
}

template <typename T>
using Logits = float[T::OF_ROWS][T::OF_COLUMNS][4];

// Logits: the rows of the warp times its share of the tile's columns. Fragments are loaded one step ahead. A product
// waits for the sum that it adds to: where a step has fewer than four sums, there are several of each (CHAINS).
template <typename T>
__device__ inline void multiply_rows(Logits<T>& logits, const typename T::Entry* rows,
                                     const typename T::Entry* columns, int lane) {
  constexpr bool ONE = T::OF_COLUMNS == 1;  // then four matrices of columns are two fragments on end, not side by side
  constexpr int OF_DEPTH = ONE ? 2 : 1, PAIRS = (T::OF_COLUMNS + 1) / 2, STEPS = T::WIDTH / (T::DEPTH * OF_DEPTH);
  constexpr int SUMS = T::OF_ROWS * T::OF_COLUMNS, CHAINS = SUMS < 4 ? 4 / SUMS : 1;
  const auto* const of_rows = rows + lane % 16 * T::PITCH + lane / 16 * T::LANES;
  const auto* const of_columns = ONE ? columns + lane % 8 * T::PITCH + lane / 8 * T::LANES
                                     : columns + (lane % 8 + lane / 16 * 8) * T::PITCH + lane / 8 % 2 * T::LANES;
  uint32_t a[2][OF_DEPTH][T::OF_ROWS][4], b[2][PAIRS][4];
  Logits<T> sums[CHAINS] = {};
  const auto load = [&](int step) {
    const int k = step * OF_DEPTH * T::DEPTH;
#pragma unroll
    for (int d = 0; d < OF_DEPTH; ++d) {
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
        load_matrices(a[step % 2][d][m], of_rows + m * 16 * T::PITCH + k + d * T::DEPTH);
      }
    }
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) load_matrices(b[step % 2][n], of_columns + n * 16 * T::PITCH + k);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + 1 < STEPS) load(step + 1);
#pragma unroll
    for (int d = 0; d < OF_DEPTH; ++d) {
      const int chain = (step * OF_DEPTH + d) % CHAINS;
#pragma unroll
      for (int n = 0; n < T::OF_COLUMNS; ++n) {
        const uint32_t(&pair)[4] = b[step % 2][n / 2];
        const int half = ONE ? d : n % 2;
        const uint32_t fragment[2] = {pair[2 * half], pair[2 * half + 1]};
#pragma unroll
        for (int m = 0; m < T::OF_ROWS; ++m) {
          T::Precision::multiply(sums[chain][m][n], a[step % 2][d][m], fragment);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
    for (int n = 0; n < T::OF_COLUMNS; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float sum = sums[0][m][n][e];
#pragma unroll
        for (int chain = 1; chain < CHAINS; ++chain) sum += sums[chain][m][n][e];
        logits[m][n][e] = sum;
      }
    }
  }
}

// The gradient += weights of the warp's rows times its share of the tile's width.
template <typename T>
__device__ inline void multiply_values(float (&gradient)[T::OF_ROWS][T::OF_WIDTH][4],
                                       const typename T::Entry* weights, const typename T::Entry* values, int lane) {
  using Precision = typename T::Precision;
  const auto* const of_rows = weights + lane % 16 * T::WEIGHT_PITCH + lane / 16 * T::LANES;
  constexpr int PAIRS = T::OF_WIDTH / 2, STEPS = T::COLUMNS / T::DEPTH * PAIRS;
  uint32_t a[2][T::OF_ROWS][4], b[2][4];
  const auto load = [&](int step) {
    const int k = step / PAIRS;
    if (step % PAIRS == 0) {
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
        load_matrices(a[k % 2][m], of_rows + m * 16 * T::WEIGHT_PITCH + k * T::DEPTH);
      }
    }
    Precision::template load_values<T::PITCH>(b[step % 2], values + k * T::DEPTH * T::PITCH + step % PAIRS * 16, lane);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + 1 < STEPS) load(step + 1);
    const int k = step / PAIRS, n = step % PAIRS * 2;
    const uint32_t(&pair)[4] = b[step % 2];
    const uint32_t left[2] = {pair[0], pair[1]}, right[2] = {pair[2], pair[3]};
#pragma unroll
    for (int m = 0; m < T::OF_ROWS; ++m) {
      Precision::multiply(gradient[m][n], a[k % 2][m], left);
      Precision::multiply(gradient[m][n + 1], a[k % 2][m], right);
    }
  }
}

template <typename T, PassKind KIND>
__global__ void __launch_bounds__(T::THREADS, 1)
    contrastive_kernel(Arguments<typename T::Entry, float> pass) {
  using Entry = typename T::Entry;
  constexpr bool GIVEN = KIND == PassKind::given_columns || KIND == PassKind::given_both;
  constexpr bool BY_ROW = KIND == PassKind::given_both, GRADIENT = KIND != PassKind::sums;
  Entry* const rows = dynamic_shared<Entry>();
  Entry* const columns = rows + T::ROWS * T::PITCH;                                         // [2, COLUMNS, PITCH]
  Entry* const weights = columns + 2 * T::COLUMNS * T::PITCH;
  float* const of_warps = reinterpret_cast<float*>(weights + T::ROWS * T::WEIGHT_PITCH);    // [ACROSS, ROWS]
  float* const positive_logit = of_warps + T::ACROSS * T::ROWS;                             // [ROWS]
  float* const column_sums = positive_logit + T::ROWS;  // [2, 2, COLUMNS]: largest and share, in two buffers

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp % T::DOWN, across = warp / T::DOWN;
  const int g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * T::ROWS, own_row = down * 16 * T::OF_ROWS;
  const int own_column = across * (T::COLUMNS / T::ACROSS), own_width = across * (T::WIDTH / T::ACROSS);
  const int first_tile = blockIdx.y * pass.tiles_of_part;
  const int all_tiles = (pass.column_count + T::COLUMNS - 1) / T::COLUMNS;
  const int tiles = min(pass.tiles_of_part, all_tiles - first_tile);

  float gradient[T::OF_ROWS][T::OF_WIDTH][4] = {};
  float largest[T::OF_ROWS][2], total[T::OF_ROWS][2] = {};  // of rows g and g + 8; given: the largest and the share
#pragma unroll
  for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[m][h] = GIVEN ? 0 : lowest<float>();
      const int row = first_row + own_row + m * 16 + h * 8 + g;
      if (BY_ROW && row < pass.row_count) {
        largest[m][h] = pass.row_largest[row];
        total[m][h] = pass.row_share[row] * WEIGHT_SCALE;
      }
    }
  }
  for (int row = threadIdx.x; row < T::ROWS; row += T::THREADS) positive_logit[row] = 0;

  const auto fetch_tile = [&](int index) {
    const int first = (first_tile + index) * T::COLUMNS, valid = index < tiles ? pass.column_count - first : 0;
    Copy<T, T::COLUMNS>::start(columns + index % 2 * (T::COLUMNS * T::PITCH),
                               pass.columns + static_cast<int64_t>(first) * T::WIDTH, valid);
    if constexpr (GIVEN) {
      if (threadIdx.x < T::COLUMNS) {
        float* const to = column_sums + index % 2 * (2 * T::COLUMNS) + threadIdx.x;
        const int column = first + threadIdx.x, bytes = static_cast<int>(threadIdx.x) < valid ? 4 : 0;
        copy_async<4>(to, pass.column_largest + column, bytes);
        copy_async<4>(to + T::COLUMNS, pass.column_share + column, bytes);
      }
    }
    copy_async_commit();
  };
  Copy<T, T::ROWS>::start(rows, pass.rows + static_cast<int64_t>(first_row) * T::WIDTH, pass.row_count - first_row);
  fetch_tile(0);

#pragma unroll 1
  for (int index = 0; index < tiles; ++index) {
    const int first_column = (first_tile + index) * T::COLUMNS;
    const Entry* const tile = columns + index % 2 * (T::COLUMNS * T::PITCH);
    copy_async_wait<0>();
    __syncthreads();  // the tile is there, and the one before has been read, with its weights and sums
    fetch_tile(index + 1);

    Logits<T> logits;
    multiply_rows<T>(logits, rows + own_row * T::PITCH, tile + own_column * T::PITCH, lane);

    // In few tiles: what does not count, and each row's positive.
    const bool at_the_end = first_column + T::COLUMNS > pass.column_count;
    const bool with_self = pass.leave_out_self && tile_meets<T>(first_column, first_row, T::ROWS);
    const int first_positive = first_row + pass.shift;
    const bool with_positive =
        !GIVEN && (tile_meets<T>(first_column, first_positive, T::ROWS) ||
                   (pass.shift > 0 && tile_meets<T>(first_column, first_positive - pass.column_count, T::ROWS)));
    if (at_the_end || with_self || with_positive) [[unlikely]] {
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
              const int column = first_column + own_column + n * 8 + 2 * t + e;
              float& logit = logits[m][n][2 * h + e];
              if (!GIVEN && column == positive) positive_logit[in_block] = logit;
              if (column >= pass.column_count || (pass.leave_out_self && column == row)) {
                logit = __uint_as_float(0xff800000);  // -inf
              }
            }
          }
        }
      }
    }

    if constexpr (!GIVEN) {
      // The largest so far, by all warps across; what was summed before is scaled to it.
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = largest[m][h];
#pragma unroll
          for (int n = 0; n < T::OF_COLUMNS; ++n) {
            top = fmaxf(top, fmaxf(logits[m][n][2 * h], logits[m][n][2 * h + 1]));
          }
          top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
          top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
          if (t == 0) of_warps[across * T::ROWS + own_row + m * 16 + h * 8 + g] = top;
        }
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = lowest<float>();
#pragma unroll
          for (int i = 0; i < T::ACROSS; ++i) {
            top = fmaxf(top, of_warps[i * T::ROWS + own_row + m * 16 + h * 8 + g]);
          }
          const float factor = exp2_approximate((largest[m][h] - top) * pass.scale);
          largest[m][h] = top;
          total[m][h] *= factor;
          if constexpr (GRADIENT) {
#pragma unroll
            for (int n = 0; n < T::OF_WIDTH; ++n) {
              gradient[m][n][2 * h] *= factor;
              gradient[m][n][2 * h + 1] *= factor;
            }
          }
        }
      }
    }

    // Weights, in place of the logits.
#pragma unroll
    for (int n = 0; n < T::OF_COLUMNS; ++n) {
      float column_largest[2], column_share[2];
      if constexpr (GIVEN) {
        const float* const from = column_sums + index % 2 * (2 * T::COLUMNS) + own_column + n * 8 + 2 * t;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          column_largest[e] = from[e];
          column_share[e] = from[T::COLUMNS + e] * WEIGHT_SCALE;
        }
      }
#pragma unroll
      for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float values[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float logit = logits[m][n][2 * h + e];
            if constexpr (GIVEN) {
              values[e] = exp2_approximate((logit - column_largest[e]) * pass.scale) * column_share[e];
              if (BY_ROW) values[e] += exp2_approximate((logit - largest[m][h]) * pass.scale) * total[m][h];
            } else {
              values[e] = exp2_approximate((logit - largest[m][h]) * pass.scale);
              total[m][h] += values[e];
            }
          }
          if constexpr (GRADIENT) {
            const int in_block = own_row + m * 16 + h * 8 + g;
            T::Precision::put(weights + in_block * T::WEIGHT_PITCH + own_column + n * 8, t, values[0], values[1]);
          }
        }
      }
    }

    if constexpr (GRADIENT) {
      __syncthreads();  // all warps across have written their weights
      multiply_values<T>(gradient, weights + own_row * T::WEIGHT_PITCH, tile + own_width, lane);
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  // This part's sums.
  const int64_t part = static_cast<int64_t>(blockIdx.y) * pass.row_count;
#pragma unroll
  for (int m = 0; m < T::OF_ROWS; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_block = own_row + m * 16 + h * 8 + g, row = first_row + in_block;
      if constexpr (!GIVEN) {
        float sum = total[m][h];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (t == 0) of_warps[across * T::ROWS + in_block] = sum;
        __syncthreads();
        if (across == 0 && t == 0 && row < pass.row_count) {
          float all = 0;
          for (int i = 0; i < T::ACROSS; ++i) all += of_warps[i * T::ROWS + in_block];
          pass.largest[part + row] = largest[m][h];
          pass.total[part + row] = all;
          pass.positive[part + row] = positive_logit[in_block];
        }
      }
      if constexpr (GRADIENT) {
        if (row >= pass.row_count) continue;
        float* const to = pass.gradient + (part + row) * pass.width;
#pragma unroll
        for (int n = 0; n < T::OF_WIDTH; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = own_width + n * 8 + 2 * t + e;
            if (column < pass.width) to[column] = gradient[m][n][2 * h + e];
          }
        }
      }
    }
  }
}

}  // namespace

}  // namespace fedkernels::cuda

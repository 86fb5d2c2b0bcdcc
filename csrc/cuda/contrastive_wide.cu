// The contrastive passes in float32 and float64, which keep their precision: plain fused multiply-adds, no tensor
// cores. Both matrices stream through shared memory in two buffers, so that any width fits; only the weights of one
// tile and the sums are kept. The gradient comes out of the pass that sums the logits.
//
// A thread has 8 x 4 logits (float64: 4 x 4) and 8 x 16 (4 x 8) entries of the gradient in registers, in rows and
// columns 16 apart, so that a warp reads two rows at a time from one place and 16 from different banks. A block holds
// 256 (float64: 128) columns of the gradient; where it is wider, blocks share them out and each forms the logits again.
#include "cuda/contrastive.h"
#include "cuda/contrastive_join.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int SIDE = 16, THREADS = SIDE * SIDE;  // threads down the rows and across the columns

template <typename T>
struct Tiles {
  static constexpr int LANES = 16 / sizeof(T);          // entries in 16 bytes
  static constexpr int OF_ROWS = sizeof(T) == 8 ? 4 : 8;  // rows of a thread
  static constexpr int OF_COLUMNS = 4;                  // its columns of logits
  static constexpr int OF_WIDTH = 4;                    // its 16 bytes of the gradient in a row
  static constexpr int ROWS = SIDE * OF_ROWS;           // in a block
  static constexpr int COLUMNS = SIDE * OF_COLUMNS;     // at a time
  static constexpr int WIDTH = SIDE * OF_WIDTH * LANES;  // of the gradient in a block
  static constexpr int DEPTH = 8 * LANES;               // of the rows, at a time
  static constexpr int VALUES = 16;                     // columns, as values of the second product, at a time
  static constexpr int PITCH = DEPTH + LANES, WEIGHT_PITCH = COLUMNS + LANES;  // rows begin in different banks
  static constexpr int OF_LOGITS = (ROWS + COLUMNS) * PITCH, OF_GRADIENT = VALUES * WIDTH;
  static constexpr int BUFFER = OF_LOGITS > OF_GRADIENT ? OF_LOGITS : OF_GRADIENT;
  static constexpr size_t BYTES = sizeof(T) * (2 * BUFFER + ROWS * WEIGHT_PITCH + ROWS);  // < 99 KB
};

struct Plain {
  static __device__ float wide(float value) { return value; }
  static __device__ double wide(double value) { return value; }
};

// Entries `start` to start + LENGTH of rows first to first + COUNT of a matrix to shared memory; 0 beyond its end.
template <int COUNT, int LENGTH, typename T>
__device__ inline void fetch(T* tile, int pitch, const T* source, int first, int count, int start, int width,
                             bool vectors) {
  constexpr int LANES = 16 / sizeof(T);
  if (vectors) {
#pragma unroll 1
    for (int index = threadIdx.x; index < COUNT * LENGTH / LANES; index += THREADS) {
      const int row = index / (LENGTH / LANES), column = index % (LENGTH / LANES) * LANES;
      const bool inside = first + row < count && start + column < width;
      const T* from = inside ? source + static_cast<int64_t>(first + row) * width + start + column : source;
      copy_async<16>(tile + row * pitch + column, from, inside ? 16 : 0);
    }
  } else {
#pragma unroll 1
    for (int index = threadIdx.x; index < COUNT * LENGTH; index += THREADS) {
      const int row = index / LENGTH, column = index % LENGTH;
      const bool inside = first + row < count && start + column < width;
      const T* from = inside ? source + static_cast<int64_t>(first + row) * width + start + column : source;
      copy_async<sizeof(T)>(tile + row * pitch + column, from, inside ? static_cast<int>(sizeof(T)) : 0);
    }
  }
}

template <typename T>
struct alignas(16) Vector {
  T values[16 / sizeof(T)];
};

template <typename T>
__device__ inline Vector<T> vector_at(const T* shared) {
  return *reinterpret_cast<const Vector<T>*>(shared);
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 1) contrastive_wide_kernel(Arguments<T, T> pass) {
  using S = Tiles<T>;
  T* const buffers = dynamic_shared<T>();
  T* const weights = buffers + 2 * S::BUFFER;
  T* const positive_logit = weights + S::ROWS * S::WEIGHT_PITCH;  // [ROWS]

  const int across = threadIdx.x % SIDE, down = threadIdx.x / SIDE;
  const int first_row = blockIdx.x * S::ROWS, first_width = blockIdx.z * S::WIDTH;
  const int first_tile = blockIdx.y * pass.tiles_of_part;
  const int all_tiles = (pass.column_count + S::COLUMNS - 1) / S::COLUMNS;
  const int tiles = min(pass.tiles_of_part, all_tiles - first_tile);
  // A tile takes steps for the logits, then some for the gradient; each step has a buffer, and the next one's is
  // filled.
  const int logit_steps = (pass.width + S::DEPTH - 1) / S::DEPTH;
  const int steps = logit_steps + (pass.gradient ? S::COLUMNS / S::VALUES : 0);

  const auto fetch_step = [&](int tile, int step, T* buffer) {
    const int first_column = (first_tile + tile) * S::COLUMNS;
    if (step < logit_steps) {
      const int start = step * S::DEPTH;
      fetch<S::ROWS, S::DEPTH>(buffer, S::PITCH, pass.rows, first_row, pass.row_count, start, pass.width, pass.vectors);
      fetch<S::COLUMNS, S::DEPTH>(buffer + S::ROWS * S::PITCH, S::PITCH, pass.columns, first_column, pass.column_count,
                                  start, pass.width, pass.vectors);
    } else {
      fetch<S::VALUES, S::WIDTH>(buffer, S::WIDTH, pass.columns, first_column + (step - logit_steps) * S::VALUES,
                                 pass.column_count, first_width, pass.width, pass.vectors);
    }
    copy_async_commit();
  };
  int turn = 0;
  // -> the step's buffer, filled. The barrier also tells that the other one, which is filled now, has been read.
  const auto begin_step = [&](int tile, int step) -> const T* {
    copy_async_wait<0>();
    __syncthreads();
    const T* const buffer = buffers + turn * S::BUFFER;
    turn ^= 1;
    const bool last = step + 1 == steps;
    if (!last || tile + 1 < tiles) fetch_step(tile + last, last ? 0 : step + 1, buffers + turn * S::BUFFER);
    return buffer;
  };

  T gradient[S::OF_ROWS][S::OF_WIDTH][S::LANES] = {};
  T largest[S::OF_ROWS], total[S::OF_ROWS];  // in the second pass as they are given: the largest and 1 / total
#pragma unroll
  for (int i = 0; i < S::OF_ROWS; ++i) {
    const int row = first_row + down + i * SIDE;
    const bool known = pass.given && pass.row_share && row < pass.row_count;
    largest[i] = known ? pass.row_largest[row] : pass.given ? T(0) : lowest<T>();
    total[i] = known ? pass.row_share[row] : T(0);
  }
  for (int row = threadIdx.x; row < S::ROWS; row += THREADS) positive_logit[row] = 0;

  fetch_step(0, 0, buffers);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int first_column = (first_tile + tile) * S::COLUMNS + across;
    T logits[S::OF_ROWS][S::OF_COLUMNS] = {};
#pragma unroll 1
    for (int step = 0; step < logit_steps; ++step) {
      const T* const rows = begin_step(tile, step) + down * S::PITCH;
      const T* const columns = rows + (S::ROWS - down + across) * S::PITCH;
#pragma unroll 2
      for (int k = 0; k < S::DEPTH; k += S::LANES) {
        Vector<T> right[S::OF_COLUMNS];
#pragma unroll
        for (int n = 0; n < S::OF_COLUMNS; ++n) right[n] = vector_at(columns + n * SIDE * S::PITCH + k);
#pragma unroll
        for (int i = 0; i < S::OF_ROWS; ++i) {
          const Vector<T> left = vector_at(rows + i * SIDE * S::PITCH + k);
#pragma unroll
          for (int l = 0; l < S::LANES; ++l) {
#pragma unroll
            for (int n = 0; n < S::OF_COLUMNS; ++n) logits[i][n] += left.values[l] * right[n].values[l];
          }
        }
      }
    }

#pragma unroll
    for (int i = 0; i < S::OF_ROWS; ++i) {
      // What does not count, and the row's positive.
      const int in_block = down + i * SIDE, row = first_row + in_block, positive = positive_of(pass, row);
      T top = lowest<T>();
#pragma unroll
      for (int n = 0; n < S::OF_COLUMNS; ++n) {
        const int column = first_column + n * SIDE;
        if (column == positive) positive_logit[in_block] = logits[i][n];
        if (column >= pass.column_count || (pass.leave_out_self && column == row)) {
          logits[i][n] = static_cast<T>(__uint_as_float(0xff800000));  // -inf
        }
        top = logits[i][n] > top ? logits[i][n] : top;
      }
      // The largest so far; what was summed before is scaled to it.
      if (!pass.given) {
#pragma unroll
        for (int offset = SIDE / 2; offset > 0; offset /= 2) {
          const T other = __shfl_xor_sync(ALL_LANES, top, offset);
          top = other > top ? other : top;
        }
        top = largest[i] > top ? largest[i] : top;
        const T factor = power_of_two((largest[i] - top) * pass.scale);
        largest[i] = top;
        total[i] *= factor;
#pragma unroll
        for (int n = 0; n < S::OF_WIDTH; ++n) {
#pragma unroll
          for (int l = 0; l < S::LANES; ++l) gradient[i][n][l] *= factor;
        }
      }
#pragma unroll
      for (int n = 0; n < S::OF_COLUMNS; ++n) {
        T weight = 0;
        if (!pass.given) {
          weight = power_of_two((logits[i][n] - largest[i]) * pass.scale);
          total[i] += weight;
        } else {
          if (pass.row_share) weight = power_of_two((logits[i][n] - largest[i]) * pass.scale) * total[i];
          const int column = first_column + n * SIDE;
          if (pass.column_share && column < pass.column_count) {
            weight +=
                power_of_two((logits[i][n] - pass.column_largest[column]) * pass.scale) * pass.column_share[column];
          }
        }
        if (pass.gradient) weights[in_block * S::WEIGHT_PITCH + n * SIDE + across] = weight;
      }
    }

#pragma unroll 1
    for (int step = logit_steps; step < steps; ++step) {
      const T* const values = begin_step(tile, step) + across * S::LANES;  // the weights are there, too
      const T* const of_rows = weights + down * S::WEIGHT_PITCH + (step - logit_steps) * S::VALUES;
#pragma unroll 1
      for (int j = 0; j < S::VALUES; j += S::LANES) {
        Vector<T> left[S::OF_ROWS];
#pragma unroll
        for (int i = 0; i < S::OF_ROWS; ++i) left[i] = vector_at(of_rows + i * SIDE * S::WEIGHT_PITCH + j);
#pragma unroll
        for (int l = 0; l < S::LANES; ++l) {
#pragma unroll
          for (int n = 0; n < S::OF_WIDTH; ++n) {
            const Vector<T> right = vector_at(values + (j + l) * S::WIDTH + n * SIDE * S::LANES);
#pragma unroll
            for (int i = 0; i < S::OF_ROWS; ++i) {
#pragma unroll
              for (int e = 0; e < S::LANES; ++e) gradient[i][n][e] += left[i].values[l] * right.values[e];
            }
          }
        }
      }
    }
  }

  // This part's sums.
  __syncthreads();
  const int64_t part = static_cast<int64_t>(blockIdx.y) * pass.row_count;
#pragma unroll
  for (int i = 0; i < S::OF_ROWS; ++i) {
    const int in_block = down + i * SIDE, row = first_row + in_block;
    T sum = total[i];
#pragma unroll
    for (int offset = SIDE / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (row >= pass.row_count) continue;
    if (!pass.given && across == 0 && blockIdx.z == 0) {
      pass.largest[part + row] = largest[i];
      pass.total[part + row] = sum;
      pass.positive[part + row] = positive_logit[in_block];
    }
    if (!pass.gradient) continue;
    T* const to = pass.gradient + (part + row) * pass.width;
#pragma unroll
    for (int n = 0; n < S::OF_WIDTH; ++n) {
#pragma unroll
      for (int e = 0; e < S::LANES; ++e) {
        const int column = first_width + (n * SIDE + across) * S::LANES + e;
        if (column < pass.width) to[column] = gradient[i][n][e];
      }
    }
  }
}

// Blocks that share out the width of the gradient.
template <typename T>
int64_t width_blocks(int64_t width, bool gradient) {
  return gradient ? up(width, Tiles<T>::WIDTH) / Tiles<T>::WIDTH : 1;
}

template <typename T>
int parts_for(const ContrastivePass& given) {
  using S = Tiles<T>;
  return parts_of(up(given.row_count, S::ROWS) / S::ROWS * width_blocks<T>(given.width, given.gradient.data),
                  up(given.column_count, S::COLUMNS) / S::COLUMNS);
}

template <typename T>
int64_t memory_for(const ContrastivePass& given) {
  return static_cast<int64_t>(sizeof(T)) * numbers_of_parts<T>(given, parts_for<T>(given));
}

template <typename T>
const char* run(const ContrastivePass& given, void* memory, Stream stream) {
  using S = Tiles<T>;
  const int64_t across = width_blocks<T>(given.width, given.gradient.data);
  if (across > 65535) return "the rows are too long";
  const Arguments<T, T> pass = arguments_of<T, T>(given, S::COLUMNS, parts_for<T>(given), memory);
  const unsigned row_blocks = static_cast<unsigned>((pass.row_count + S::ROWS - 1) / S::ROWS);
  const Shape shape = {dim3(row_blocks, static_cast<unsigned>(pass.parts), static_cast<unsigned>(across)),
                       dim3(THREADS), S::BYTES};
  if (const char* error = launch(shape, stream, contrastive_wide_kernel<T>, pass)) return error;
  return join<Plain>(pass, given, stream);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_contrastive_wide_memory(const fedkernels::cuda::ContrastivePass* pass) {
  using namespace fedkernels::cuda;
  return pass->rows.dtype == fedkernels::DType::f64 ? memory_for<double>(*pass) : memory_for<float>(*pass);
}

extern "C" const char* cuda_contrastive_wide(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                             fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  return pass->rows.dtype == fedkernels::DType::f64 ? run<double>(*pass, memory, stream)
                                                    : run<float>(*pass, memory, stream);
}

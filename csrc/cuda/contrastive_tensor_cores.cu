// InfoNCE of 16-bit rows of at most 256 columns in one kernel, with the gradient in the queries or without one.
//
// As in fused attention: a block keeps a tile of rows in shared memory, tiles of columns stream past it in two buffers,
// and the logits live in registers. The second product takes the tile of columns, which is there, as its values: so
// loss and gradient come out of one pass. Columns are shared out among blocks where the rows alone would not fill the
// device; each block writes its part of the sums, and a second kernel joins them in order.
//
// The warps of a block stand in a grid: for the logits across the tile's columns, for the gradient across its width.
// Weights go from the one to the other through shared memory, rounded to the inputs' dtype.
//
// The end of the matrices and the positives are met in few tiles: one test for the whole block finds these.
#include "cuda/contrastive.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/ptx.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

using Entry = uint16_t;

struct Pass {
  const Entry *rows, *columns;
  int row_count, column_count;
  float temperature, scale;           // scale: log2(e) / temperature
  int parts, tiles_of_part;           // of the columns; tiles of columns in each
  float *largest, *total, *positive;  // [parts, row_count]
  float* gradient;                    // [parts, row_count, width], or null
};

struct BFloat16 {
  static __device__ float wide(Entry bits) { return bfloat_to_float(bits); }
  static __device__ uint32_t pack(float first, float second) { return pack_bfloat(first, second); }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bfloat(sums, a, b);
  }
};
struct Float16 {
  static __device__ float wide(Entry bits) { return half_to_float(bits); }
  static __device__ uint32_t pack(float first, float second) { return pack_half(first, second); }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_half(sums, a, b);
  }
};

constexpr int DOWN = 4, ACROSS = 2;                 // warps of a block
constexpr int OF_ROWS = 2;                          // times 16 rows in a warp
constexpr int ROWS = DOWN * 16 * OF_ROWS;           // in a block
constexpr int COLUMNS = 64;                         // at a time
constexpr int OF_COLUMNS = COLUMNS / (8 * ACROSS);  // tiles of 8 columns of logits in a warp
constexpr int THREADS = 32 * DOWN * ACROSS;
constexpr int WEIGHT_PITCH = COLUMNS + 8;
constexpr float LOWEST = -3e38f;  // below every logit, yet finite: exp(-inf - LOWEST) is 0 and not NaN

template <typename Precision_, int WIDTH_>
struct Tiles {
  using Precision = Precision_;
  static constexpr int WIDTH = WIDTH_;
  static constexpr int OF_WIDTH = WIDTH / (8 * ACROSS);  // tiles of 8 columns of the gradient in a warp
  static constexpr int PITCH = WIDTH + 8;                // 16 bytes more keep the rows of a matrix in other banks
  static constexpr size_t BYTES =
      sizeof(Entry) * ((ROWS + 2 * COLUMNS) * PITCH + ROWS * WEIGHT_PITCH) + sizeof(float) * (ACROSS + 1) * ROWS;
};

// Copies `count` rows of a matrix to shared memory: each thread its 16 bytes of every AT_ONCE-th row. `source` is at
// the first of the rows, of which `valid` are in the matrix (or fewer than none): others become 0.
template <typename T, int COUNT>
__device__ inline void copy_rows(Entry* tile, const Entry* source, int valid) {
  constexpr int OF_ROW = T::WIDTH / 8, AT_ONCE = THREADS / OF_ROW;
  static_assert(OF_ROW <= 32 && COUNT % AT_ONCE == 0);
  const int row = threadIdx.x / OF_ROW, column = threadIdx.x % OF_ROW * 8;
#pragma unroll
  for (int i = 0; i < COUNT; i += AT_ONCE) {
    copy_async(tile + (i + row) * T::PITCH + column, source + (i + row) * T::WIDTH + column, i + row < valid ? 16 : 0);
  }
}

using Logits = float[OF_ROWS][OF_COLUMNS][4];

// Logits: the rows of the warp times its share of the tile's columns. Fragments are loaded one step ahead.
template <typename T>
__device__ inline void multiply_rows(Logits& logits, const Entry* rows, const Entry* columns, int lane) {
  constexpr int PAIRS = OF_COLUMNS / 2, STEPS = T::WIDTH / 16;
  const Entry* const of_rows = rows + lane % 16 * T::PITCH + lane / 16 * 8;
  const Entry* const of_columns = columns + (lane % 8 + lane / 16 * 8) * T::PITCH + lane / 8 % 2 * 8;
  uint32_t a[2][OF_ROWS][4], b[2][PAIRS][4];
  const auto load = [&](int step) {
#pragma unroll
    for (int m = 0; m < OF_ROWS; ++m) load_matrices(a[step % 2][m], of_rows + m * 16 * T::PITCH + step * 16);
#pragma unroll
    for (int n = 0; n < PAIRS; ++n) load_matrices(b[step % 2][n], of_columns + n * 16 * T::PITCH + step * 16);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + 1 < STEPS) load(step + 1);
#pragma unroll
    for (int n = 0; n < OF_COLUMNS; ++n) {
      const uint32_t(&pair)[4] = b[step % 2][n / 2];
      const uint32_t fragment[2] = {pair[n % 2 * 2], pair[n % 2 * 2 + 1]};
#pragma unroll
      for (int m = 0; m < OF_ROWS; ++m) T::Precision::multiply(logits[m][n], a[step % 2][m], fragment);
    }
  }
}

// The gradient += weights of the warp's rows times its share of the tile's width.
template <typename T>
__device__ inline void multiply_values(float (&gradient)[OF_ROWS][T::OF_WIDTH][4], const Entry* weights,
                                       const Entry* values, int lane) {
  const Entry* const of_rows = weights + lane % 16 * WEIGHT_PITCH + lane / 16 * 8;
  constexpr int PAIRS = T::OF_WIDTH / 2, STEPS = COLUMNS / 16 * PAIRS;
  uint32_t a[2][OF_ROWS][4], b[2][4];
  const auto load = [&](int step) {
    const int k = step / PAIRS;
    if (step % PAIRS == 0) {
#pragma unroll
      for (int m = 0; m < OF_ROWS; ++m) load_matrices(a[k % 2][m], of_rows + m * 16 * WEIGHT_PITCH + k * 16);
    }
    const Entry* const from = values + k * 16 * T::PITCH + step % PAIRS * 16;
    load_matrices_transposed(b[step % 2], from + lane % 16 * T::PITCH + lane / 16 * 8);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if (step + 1 < STEPS) load(step + 1);
    const int k = step / PAIRS, n = step % PAIRS * 2;
    const uint32_t(&pair)[4] = b[step % 2];
    const uint32_t left[2] = {pair[0], pair[1]}, right[2] = {pair[2], pair[3]};
#pragma unroll
    for (int m = 0; m < OF_ROWS; ++m) {
      T::Precision::multiply(gradient[m][n], a[k % 2][m], left);
      T::Precision::multiply(gradient[m][n + 1], a[k % 2][m], right);
    }
  }
}

template <typename T, bool GRADIENT>
__global__ void __launch_bounds__(THREADS, 1) contrastive_kernel(Pass pass) {
  Entry* const rows = dynamic_shared<Entry>();
  Entry* const columns = rows + ROWS * T::PITCH;  // [2, COLUMNS, PITCH]
  Entry* const weights = columns + 2 * COLUMNS * T::PITCH;
  float* const of_warps = reinterpret_cast<float*>(weights + ROWS * WEIGHT_PITCH);  // [ACROSS, ROWS]
  float* const positive_logit = of_warps + ACROSS * ROWS;                           // [ROWS]

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, down = warp % DOWN, across = warp / DOWN;
  const int g = lane / 4, t = lane % 4;
  const int first_row = blockIdx.x * ROWS, own_row = down * 16 * OF_ROWS;
  const int own_column = across * (COLUMNS / ACROSS), own_width = across * (T::WIDTH / ACROSS);
  const int first_tile = blockIdx.y * pass.tiles_of_part;
  const int tiles = min(pass.tiles_of_part, (pass.column_count + COLUMNS - 1) / COLUMNS - first_tile);

  float gradient[OF_ROWS][T::OF_WIDTH][4] = {};
  float largest[OF_ROWS][2] = {{LOWEST, LOWEST}, {LOWEST, LOWEST}}, total[OF_ROWS][2] = {};  // of rows g and g + 8
  for (int row = threadIdx.x; row < ROWS; row += THREADS) positive_logit[row] = 0;

  const auto fetch_tile = [&](int index) {
    const int first = (first_tile + index) * COLUMNS, valid = index < tiles ? pass.column_count - first : 0;
    copy_rows<T, COLUMNS>(columns + index % 2 * (COLUMNS * T::PITCH),
                          pass.columns + static_cast<int64_t>(first) * T::WIDTH, valid);
    copy_async_commit();
  };
  copy_rows<T, ROWS>(rows, pass.rows + static_cast<int64_t>(first_row) * T::WIDTH, pass.row_count - first_row);
  fetch_tile(0);

#pragma unroll 1
  for (int index = 0; index < tiles; ++index) {
    const int first_column = (first_tile + index) * COLUMNS;
    const Entry* const tile = columns + index % 2 * (COLUMNS * T::PITCH);
    copy_async_wait<0>();
    __syncthreads();  // the tile is there, and the one before has been read, with its weights and sums
    fetch_tile(index + 1);

    Logits logits = {};
    multiply_rows<T>(logits, rows + own_row * T::PITCH, tile + own_column * T::PITCH, lane);

    // In few tiles: columns behind the last one, and each row's positive.
    const bool with_positive = first_row < first_column + COLUMNS && first_column < first_row + ROWS;
    if (first_column + COLUMNS > pass.column_count || with_positive) [[unlikely]] {
#pragma unroll
      for (int m = 0; m < OF_ROWS; ++m) {
#pragma unroll
        for (int n = 0; n < OF_COLUMNS; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int in_block = own_row + m * 16 + e / 2 * 8 + g;
            const int column = first_column + own_column + n * 8 + 2 * t + e % 2;
            if (column == first_row + in_block) positive_logit[in_block] = logits[m][n][e];
            if (column >= pass.column_count) logits[m][n][e] = -INFINITY;
          }
        }
      }
    }

    // The largest so far, by all warps across; what was summed before is scaled to it.
#pragma unroll
    for (int m = 0; m < OF_ROWS; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = largest[m][h];
#pragma unroll
        for (int n = 0; n < OF_COLUMNS; ++n) top = fmaxf(top, fmaxf(logits[m][n][2 * h], logits[m][n][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
        if (t == 0) of_warps[across * ROWS + own_row + m * 16 + h * 8 + g] = top;
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < OF_ROWS; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int in_block = own_row + m * 16 + h * 8 + g;
        const float top = fmaxf(of_warps[in_block], of_warps[ROWS + in_block]);
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
#pragma unroll
        for (int n = 0; n < OF_COLUMNS; ++n) {
          const float first = exp2_approximate((logits[m][n][2 * h] - top) * pass.scale);
          const float second = exp2_approximate((logits[m][n][2 * h + 1] - top) * pass.scale);
          total[m][h] += first + second;
          if constexpr (GRADIENT) {
            Entry* const to = weights + in_block * WEIGHT_PITCH + own_column + n * 8 + 2 * t;
            *reinterpret_cast<uint32_t*>(to) = T::Precision::pack(first, second);
          }
        }
      }
    }

    if constexpr (GRADIENT) {
      __syncthreads();  // all warps across have written their weights
      multiply_values<T>(gradient, weights + own_row * WEIGHT_PITCH, tile + own_width, lane);
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  // This part's sums.
  const int64_t part = static_cast<int64_t>(blockIdx.y) * pass.row_count;
#pragma unroll
  for (int m = 0; m < OF_ROWS; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_block = own_row + m * 16 + h * 8 + g, row = first_row + in_block;
      float sum = total[m][h];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      if (t == 0) of_warps[across * ROWS + in_block] = sum;
      __syncthreads();
      if (row >= pass.row_count) continue;
      if (across == 0 && t == 0) {
        pass.largest[part + row] = largest[m][h];
        pass.total[part + row] = of_warps[in_block] + of_warps[ROWS + in_block];
        pass.positive[part + row] = positive_logit[in_block];
      }
      if constexpr (GRADIENT) {
        float* const to = pass.gradient + (part + row) * T::WIDTH + own_width + 2 * t;
#pragma unroll
        for (int n = 0; n < T::OF_WIDTH; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) to[n * 8 + e] = gradient[m][n][2 * h + e];
        }
      }
    }
  }
}

// One block a row: joins the parts in their order.
template <typename T>
__global__ void __launch_bounds__(128) join_kernel(Pass pass, float* losses, float* gradient) {
  const int row = blockIdx.x;
  float top = LOWEST, total = 0, logit = 0;
  for (int part = 0; part < pass.parts; ++part) top = fmaxf(top, pass.largest[part * pass.row_count + row]);
  for (int part = 0; part < pass.parts; ++part) {
    const int at = part * pass.row_count + row;
    total += pass.total[at] * exp2f((pass.largest[at] - top) * pass.scale);
    logit += pass.positive[at];  // 0 but for the part that holds it
  }
  if (threadIdx.x == 0) losses[row] = logf(total) + (top - logit) / pass.temperature;
  if (!gradient) return;
  for (int column = threadIdx.x; column < T::WIDTH; column += blockDim.x) {
    float sum = 0;
    for (int part = 0; part < pass.parts; ++part) {
      const int64_t at = static_cast<int64_t>(part) * pass.row_count + row;
      sum += pass.gradient[at * T::WIDTH + column] * exp2f((pass.largest[at] - top) * pass.scale);
    }
    const int64_t at = static_cast<int64_t>(row) * T::WIDTH + column;
    gradient[at] = (sum / total - T::Precision::wide(pass.columns[at])) / pass.temperature;
  }
}

// Into how many parts the columns are shared out. A multiprocessor holds one block, for its registers, and blocks
// beyond a multiple of the multiprocessors cost a whole wave more: what is least is the waves times the tiles that a
// block goes through, its start counted as one. Each part has sums and gradients of its own in memory, so there are no
// more than fill the device, and not two where the rows alone make more than two waves.
int parts_of(int64_t row_blocks, int64_t column_tiles) {
  const int64_t at_a_time = multiprocessors(), fill = (at_a_time + row_blocks - 1) / row_blocks;
  const int64_t useful = fill == 1 && row_blocks < 2 * at_a_time ? 2 : fill;
  const int64_t of_tiles = (column_tiles + 3) / 4;  // a part has some tiles
  int64_t best = 1, least = 0;
  for (int64_t parts = 1; parts <= useful && parts <= of_tiles; ++parts) {
    const int64_t waves = (row_blocks * parts + at_a_time - 1) / at_a_time;
    const int64_t cost = waves * ((column_tiles + parts - 1) / parts + 1);
    if (parts > 1 && cost >= least) continue;
    least = cost;
    best = parts;
  }
  return static_cast<int>(best);
}

int64_t up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

int parts_of(const ContrastivePass& pass) {
  return parts_of(up(pass.row_count, ROWS) / ROWS, up(pass.column_count, COLUMNS) / COLUMNS);
}

template <typename T>
const char* run(const ContrastivePass& given, void* memory, Stream stream) {
  if (T::BYTES > shared_limit()) return "the width is too large for this device";
  Pass pass = {};
  pass.rows = static_cast<const Entry*>(given.rows.data);
  pass.columns = static_cast<const Entry*>(given.columns.data);
  pass.row_count = static_cast<int>(given.row_count);
  pass.column_count = static_cast<int>(given.column_count);
  pass.temperature = static_cast<float>(given.temperature);
  // Never 0, however high the temperature: a logit of minus infinity keeps its value.
  pass.scale = fmaxf(static_cast<float>(1.4426950408889634 / given.temperature), 1e-36f);
  const int tiles = static_cast<int>(up(given.column_count, COLUMNS) / COLUMNS), most = parts_of(given);
  pass.tiles_of_part = (tiles + most - 1) / most;
  pass.parts = (tiles + pass.tiles_of_part - 1) / pass.tiles_of_part;
  const int64_t sums = static_cast<int64_t>(pass.parts) * given.row_count;
  pass.largest = static_cast<float*>(memory);
  pass.total = pass.largest + sums;
  pass.positive = pass.total + sums;
  pass.gradient = most > 1 ? pass.positive + sums : given.gradient;
  const unsigned row_blocks = static_cast<unsigned>(up(given.row_count, ROWS) / ROWS);
  const Shape shape = {dim3(row_blocks, static_cast<unsigned>(pass.parts)), dim3(THREADS), T::BYTES};
  const auto kernel = given.gradient ? contrastive_kernel<T, true> : contrastive_kernel<T, false>;
  if (const char* error = launch(shape, stream, kernel, pass)) return error;
  return launch({dim3(static_cast<unsigned>(given.row_count)), dim3(128)}, stream, join_kernel<T>, pass, given.losses,
                given.gradient);
}

template <typename Precision>
const char* run_any(const ContrastivePass& pass, void* memory, Stream stream) {
  if (pass.width == 64) return run<Tiles<Precision, 64>>(pass, memory, stream);
  if (pass.width == 128) return run<Tiles<Precision, 128>>(pass, memory, stream);
  if (pass.width == 256) return run<Tiles<Precision, 256>>(pass, memory, stream);
  return "rows must have 64, 128 or 256 columns";
}

}  // namespace

}  // namespace fedkernels::cuda

using namespace fedkernels::cuda;

extern "C" int64_t cuda_contrastive_memory(const ContrastivePass* pass) {
  const int64_t parts = parts_of(*pass);
  return parts * pass->row_count * (3 + (pass->gradient && parts > 1 ? pass->width : 0)) * 4;
}

extern "C" const char* cuda_contrastive(const ContrastivePass* pass, void* memory, Stream stream) {
  const bool bfloat = pass->rows.dtype == fedkernels::DType::bf16;
  return bfloat ? run_any<BFloat16>(*pass, memory, stream) : run_any<Float16>(*pass, memory, stream);
}

// A block goes through its share of the entries, some tens to hundreds at a time: it reads them once for all clients,
// while it still works on those before, and lays the differences into shared memory. There each thread multiplies the
// differences of eight clients with those of four others, so that twelve reads serve 32 products. From 32 clients on the
// products of float32 are made on the tensor cores, 16 clients by 16 at a time, each difference as the sum of two parts
// in tf32: what is left out of a product is below 2^-20 of it.
//
// float32 (and half) inputs are multiplied in float32: 16 products a sum, 16 sums another, and these are added in
// float64. So at most 1e-6 is lost, were all roundings to go one way. Where a sum leaves the range of float32
// everything is computed again in float64, as it is for float64 inputs.
#include "cuda/delta_gram.h"

#include "cuda/dtype.h"
#include "cuda/parameter_lists.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int THREADS = 192;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
constexpr int BLOCKS = 1;  // of a multiprocessor: the shared memory of these holds one
#else
constexpr int BLOCKS = 2;
#endif
constexpr int ROWS = 8, COLUMNS = 4;  // clients of a thread's tile
constexpr int VALUES = ROWS * COLUMNS;
constexpr int WARPS = THREADS / 32, SIDE = 16;  // clients of a warp's tile on the tensor cores, each way
constexpr int OF_SIDES = SIDE * SIDE / 32;      // values of it that a thread holds
constexpr int LEAST_FOR_TENSOR_CORES = 32;      // clients: fewer are bound by memory
constexpr int PANEL = 104;           // clients in a triangle: 182 tiles, 28 on the tensor cores
constexpr int RECTANGLE_ROWS = 40;   // beside PANEL columns: 130 tiles, 21 on the tensor cores
constexpr int MOST_VALUES = 28 * SIDE * SIDE;  // of a part: more than THREADS * VALUES
constexpr int MOST_MEMBERS = 6;      // clients of which a thread reads entries
constexpr int RUN = 16;              // products that are summed, and such sums that are summed, in float32
constexpr int64_t CHUNK = 1536;      // a multiple of every depth
constexpr double SMALLEST = 1e-24, LARGEST = 1e37;  // of sums in float32

// A part of the matrix: the triangle of some clients, or the rectangle of `rows` with other `columns`.
struct Part {
  int row_start, rows, column_start, columns;
  bool triangle, tensor_cores;
  int tiles;   // of ROWS x COLUMNS clients, one a thread; on the tensor cores of SIDE x SIDE, some a warp
  int slices;  // threads that share a tile's entries
  int depth;   // entries that lie in shared memory at a time

  __host__ __device__ int tile_rows() const { return tensor_cores ? SIDE : ROWS; }
  __host__ __device__ int tile_columns() const { return tensor_cores ? SIDE : COLUMNS; }
  __host__ __device__ int values() const { return tile_rows() * tile_columns(); }
  __host__ __device__ int row_groups() const { return (rows + tile_rows() - 1) / tile_rows(); }
  __host__ __device__ int column_groups() const { return (columns + tile_columns() - 1) / tile_columns(); }
  // Fours of clients in shared memory: the columns, of a triangle also as rows; then the rows of a rectangle.
  __host__ __device__ int column_fours() const { return triangle ? 2 * row_groups() : column_groups(); }
  __host__ __device__ int row_fours() const { return triangle ? 0 : 2 * row_groups(); }
  // Places for the differences of a client: on the tensor cores whole tiles of columns, then of a rectangle's rows.
  __host__ __device__ int slots() const {
    if (tensor_cores) return SIDE * (column_groups() + (triangle ? 0 : row_groups()));
    return 4 * (column_fours() + row_fours());
  }
  __host__ __device__ int members() const { return triangle ? columns : columns + rows; }
  __host__ __device__ int pitch() const { return depth + 4; }

  __device__ int client(int member) const {
    return member < columns ? column_start + member : row_start + member - columns;
  }

  // Where a client's differences lie. Neighbours are apart, for threads of a warp read every fourth client.
  __device__ int column_slot(int column) const { return column % 4 * column_fours() + column / 4; }
  __device__ int row_slot(int row) const {
    return triangle ? column_slot(row) : 4 * column_fours() + row % 4 * row_fours() + row / 4;
  }
  __device__ int slot(int member) const {
    if (tensor_cores) return member < columns ? member : SIDE * column_groups() + member - columns;
    return member < columns ? column_slot(member) : row_slot(member - columns);
  }

  // The first row and column of a tile. A triangle has those that reach above the diagonal.
  __device__ void tile(int index, int* row, int* column) const {
    int group = 0, first = 0, width = column_groups();
    while (index >= width - first) {
      index -= width - first;
      ++group;
      if (triangle) first += tile_rows() / tile_columns();
    }
    *row = group * tile_rows();
    *column = (first + index) * tile_columns();
  }
};

Part part_of(int64_t row_start, int64_t rows, int64_t column_start, int64_t columns, bool triangle,
             bool tensor_cores) {
  Part part = {static_cast<int>(row_start), static_cast<int>(rows), static_cast<int>(column_start),
               static_cast<int>(columns),   triangle,               tensor_cores,
               0,                           1,                      2 * RUN};
  for (int group = 0; group < part.row_groups(); ++group) {
    part.tiles += part.column_groups() - (triangle ? part.tile_rows() / part.tile_columns() * group : 0);
  }
  if (tensor_cores) return part;
  // More slices make the tile of entries longer, and leave fewer threads to read a client beside it.
  for (int slices : {48, 24, 16, 8, 4, 2}) {
    const bool all_are_read = slices < 4 || MOST_MEMBERS * (THREADS / (2 * slices)) >= part.members();
    if (part.slices == 1 && slices * part.tiles <= THREADS && all_are_read) part.slices = slices;
  }
  part.depth = part.slices >= 4 ? 8 * part.slices : 32;
  return part;
}

// The tiles of entries that a block goes through: some in each of its chunks.
struct Walk {
  int chunk, done, count, dtype;  // of the chunk's `count` entries `done` are behind
  const Array* arrays;
  int64_t start;

  __device__ void enter(const DeviceLists& lists) {
    done = 0;
    if (chunk >= lists.chunks) return;
    const DeviceLists::Piece piece = lists.piece(chunk);
    arrays = piece.arrays;
    start = piece.start;
    count = piece.count;
    dtype = piece.dtype;
  }
  __device__ void advance(const DeviceLists& lists, int depth) {
    done += depth;
    if (done < count) return;
    chunk += gridDim.x;
    enter(lists);
  }
};

__device__ inline float multiply_add(float x, float y, float z) { return __fmaf_rn(x, y, z); }
__device__ inline double multiply_add(double x, double y, double z) { return __fma_rn(x, y, z); }

// Some float32 values as sums of two, of which the tensor cores read the first 10 bits of mantissa: to 2^-21 of each.
template <int COUNT>
struct Split {
  uint32_t high[COUNT], low[COUNT];

  __device__ void load(const float* row) {
    load_matrices(high, row);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const float value = __uint_as_float(high[i]);
      high[i] = to_tf32(value);
      low[i] = __float_as_uint(value - __uint_as_float(high[i]));
    }
  }
};

// sums[half] += 16 entries of 16 rows, left[step] holding 8 of each, times those of 16 columns, right[half] of 8 of them.
__device__ inline void multiply_sides(float (&sums)[2][4], const Split<4> (&left)[2], const Split<4> (&right)[2]) {
  const auto part = [](const uint32_t (&all)[4], int step, uint32_t (&some)[2]) {
    some[0] = all[2 * step];
    some[1] = all[2 * step + 1];
  };
  uint32_t some[2];
  // The small products first: tensor cores cut off what a sum cannot hold.
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part(right[half].high, step, some);
      mma_tf32(sums[half], left[step].low, some);
      part(right[half].low, step, some);
      mma_tf32(sums[half], left[step].high, some);
    }
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      part(right[half].high, step, some);
      mma_tf32(sums[half], left[step].high, some);
    }
  }
}

// Partial sums of a part: partials[value * gridDim.x + block], part.values() for each tile. T is the type that it
// computes in; where `wanted` is given nothing is done but where it holds 1. TILES: of a warp on the tensor cores, or 0.
template <typename T, int TILES>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? BLOCKS : 1)
    delta_gram_kernel(const DeviceLists lists, const Part part, double* partials, const int* wanted) {
  constexpr int OWN = TILES ? TILES * OF_SIDES : VALUES;  // sums of a thread
  if (wanted && *wanted == 0) return;
  T* const deltas = reinterpret_cast<T*>(dynamic_shared<double>() + OWN * THREADS);
  const int thread = threadIdx.x, pitch = part.pitch(), units = part.depth / 4, lanes = THREADS / units;
  const int unit = thread % units, first_member = thread / units, members = part.members();
  for (int i = thread; i < part.slots() * pitch; i += THREADS) deltas[i] = 0;

  // What this thread multiplies; on the tensor cores what its warp does: where the rows and columns of its tiles begin.
  const int lane = thread % 32, warp = thread / 32;
  int side_rows[TILES + 1], side_columns[TILES + 1];
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    if (warp * TILES + n >= part.tiles) continue;
    part.tile(warp * TILES + n, &side_rows[n], &side_columns[n]);
    side_rows[n] = (side_rows[n] + (part.triangle ? 0 : SIDE * part.column_groups())) * pitch;
    side_columns[n] *= pitch;
  }
  const int slice = thread / part.tiles;
  const bool active = slice < part.slices;
  int row = 0, column = 0;
  part.tile(thread % part.tiles, &row, &column);
  const int of_rows = part.row_slot(row) * pitch, of_columns = part.column_slot(column) * pitch;
  const int row_step = (part.triangle ? part.column_fours() : part.row_fours()) * pitch;
  const int column_step = part.column_fours() * pitch;

  T sums[ROWS][COLUMNS] = {}, of_runs[OWN] = {};          // the second where T is float, the first on no tensor cores
  double* const all = dynamic_shared<double>() + thread;  // [OWN, THREADS]
#pragma unroll
  for (int v = 0; v < OWN; ++v) all[v * THREADS] = 0;
  int products = 0;  // since the last sum in float64
  const auto end_run = [&] {
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
      of_runs[v] += sums[v / COLUMNS][v % COLUMNS];
      sums[v / COLUMNS][v % COLUMNS] = 0;
    }
  };
  const auto end_runs = [&] {
    products = 0;
#pragma unroll
    for (int v = 0; v < OWN; ++v) {
      all[v * THREADS] += of_runs[v];
      of_runs[v] = 0;
    }
  };

  const auto at = [&](int index) { return *reinterpret_cast<const Four<T>*>(deltas + index); };

  Walk walk = {static_cast<int>(blockIdx.x), 0, 0, MIXED, nullptr, 0};

  // What has been read of the next tile. Loads of all members are on their way together: their addresses come first,
  // and nothing waits for an entry before it is needed. So halves lie here as they lie in memory, in the first two
  // words.
  T base[4], next[MOST_MEMBERS][4];
  const auto halves = [](int dtype) {
    return sizeof(T) == 4 && (dtype == static_cast<int>(DType::bf16) || dtype == static_cast<int>(DType::f16));
  };
  const auto read = [&] {
    const int offset = walk.done + 4 * unit, count = first_member < lanes ? walk.count - offset : 0;
    const int64_t start = walk.start + offset;
    if (walk.dtype == MIXED || (sizeof(T) == 8 && walk.dtype != static_cast<int>(DType::f64))) {
      read_four(base, walk.arrays[0], start, count);
#pragma unroll
      for (int n = 0; n < MOST_MEMBERS; ++n) {
        const int member = first_member + n * lanes;
        if (member < members) read_four(next[n], walk.arrays[1 + part.client(member)], start, count);
      }
      return;
    }
    const void* from[MOST_MEMBERS];
#pragma unroll
    for (int n = 0; n < MOST_MEMBERS; ++n) {
      const int member = first_member + n * lanes;
      from[n] = member < members ? walk.arrays[1 + part.client(member)].data : nullptr;
    }
    const auto read_all = [&](const auto& read_one) {
      read_one(base, walk.arrays[0].data);
#pragma unroll
      for (int n = 0; n < MOST_MEMBERS; ++n) {
        if (from[n]) read_one(next[n], from[n]);
      }
    };
    if constexpr (sizeof(T) == 4) {
      if (halves(walk.dtype)) {
        read_all([&](T(&four)[4], const void* source) {
          uint32_t words[2];
          read_four_halves(words, static_cast<const uint16_t*>(source), start, count);
          four[0] = __uint_as_float(words[0]);
          four[1] = __uint_as_float(words[1]);
        });
        return;
      }
    }
    read_all([&](T(&four)[4], const void* source) { read_four(four, static_cast<const T*>(source), start, count); });
  };
  const auto widen_halves = [&](T(&four)[4]) {
    if constexpr (sizeof(T) == 4) {
      const uint32_t words[2] = {__float_as_uint(four[0]), __float_as_uint(four[1])};
      const bool bfloat = walk.dtype == static_cast<int>(DType::bf16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
        four[i] = bfloat ? widen(BFloat{bits}) : widen(Half{bits});
      }
    }
  };

  const auto lay_down = [&] {  // what has been read, as differences, in shared memory
    if (first_member >= lanes) return;
    const bool narrow = halves(walk.dtype);
    if (narrow) widen_halves(base);
#pragma unroll
    for (int n = 0; n < MOST_MEMBERS; ++n) {
      const int member = first_member + n * lanes;
      if (member >= members) continue;
      if (narrow) widen_halves(next[n]);
      Four<T> four;
#pragma unroll
      for (int i = 0; i < 4; ++i) four.values[i] = base[i] - next[n][i];
      *reinterpret_cast<Four<T>*>(deltas + part.slot(member) * pitch + 4 * unit) = four;
    }
  };
  const auto multiply = [&] {
#pragma unroll 1
    for (int i = 4 * slice; i < part.depth; i += 4 * part.slices) {
      Four<T> right[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) right[c] = at(of_columns + c * column_step + i);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Four<T> left = at(of_rows + r % 4 * row_step + r / 4 * pitch + i);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[r][c] = multiply_add(left.values[e], right[c].values[e], sums[r][c]);
        }
      }
      if constexpr (sizeof(T) == 4) {
        if ((products += 4) % RUN == 0) end_run();
        if (products == RUN * RUN) end_runs();
      }
    }
  };
  const auto multiply_on_tensor_cores = [&] {
    if constexpr (TILES > 0) {
#pragma unroll 1
      for (int i = 0; i < part.depth; i += RUN) {
        const float* const of_lane_left = deltas + lane % 16 * pitch + lane / 16 * 4 + i;
        const float* const of_lane_right = deltas + lane % 8 * pitch + lane / 8 * 4 + i;
        Split<4> left[2], right[2];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          if (warp * TILES + n >= part.tiles) break;
          if (n == 0 || side_rows[n] != side_rows[n - 1]) {
            left[0].load(of_lane_left + side_rows[n]);
            left[1].load(of_lane_left + side_rows[n] + 8);
          }
          right[0].load(of_lane_right + side_columns[n]);
          right[1].load(of_lane_right + side_columns[n] + 8 * pitch);
          float of_run[2][4] = {};
          multiply_sides(of_run, left, right);
#pragma unroll
          for (int v = 0; v < OF_SIDES; ++v) of_runs[n * OF_SIDES + v] += of_run[v / 4][v % 4];
        }
        if ((products += RUN) == RUN * RUN) end_runs();
      }
    }
  };

  walk.enter(lists);
  for (bool there = false;; there = true) {
    const bool more = walk.chunk < lists.chunks;
    if (more) read();
    if (there) {
      if constexpr (TILES > 0) {
        multiply_on_tensor_cores();
      } else {
        if (active) multiply();
      }
    }
    if (!more) break;
    __syncthreads();  // the tile before has been multiplied
    lay_down();
    __syncthreads();
    walk.advance(lists, part.depth);
  }
  if constexpr (TILES > 0) {
    end_runs();
#pragma unroll
    for (int v = 0; v < OWN; ++v) {
      const int tile = warp * TILES + v / OF_SIDES, e = v % OF_SIDES;
      const int of_row = lane / 4 + e / 2 % 2 * 8, of_column = e / 4 * 8 + lane % 4 * 2 + e % 2;
      const int64_t index = tile * SIDE * SIDE + of_row * SIDE + of_column;
      if (tile < part.tiles) partials[index * gridDim.x + blockIdx.x] = all[v * THREADS];
    }
    return;
  }
  end_run();
  end_runs();

  // The threads of a tile are added in order.
  __syncthreads();
  for (int index = thread; index < part.tiles * VALUES; index += THREADS) {
    const double* of_tile = dynamic_shared<double>() + index % VALUES * THREADS + index / VALUES;
    double value = 0;
    for (int s = 0; s < part.slices; ++s) value += of_tile[s * part.tiles];
    partials[static_cast<int64_t>(index) * gridDim.x + blockIdx.x] = value;
  }
}

// Adds up the blocks' partial sums, a warp for each. `out_of_range` becomes 1 where float32 cannot have held a sum.
__global__ void __launch_bounds__(256)
    delta_gram_sums(const Part part, const double* partials, int blocks, int clients, double* gram, int* out_of_range,
                    const int* wanted) {
  if (wanted && *wanted == 0) return;
  const int index = static_cast<int>(blockIdx.x) * 8 + threadIdx.x / 32;
  double value = 0;
  if (index < part.tiles * part.values()) {
    for (int block = threadIdx.x % 32; block < blocks; block += 32) {
      value += partials[static_cast<int64_t>(index) * blocks + block];
    }
  }
  value = warp_reduce(value, Sum());
  if (index >= part.tiles * part.values() || threadIdx.x % 32 != 0) return;
  int row, column;
  part.tile(index / part.values(), &row, &column);
  row += index % part.values() / part.tile_columns();
  column += index % part.tile_columns();
  if (row >= part.rows || column >= part.columns || (part.triangle && column < row)) return;
  const int64_t i = part.row_start + row, j = part.column_start + column;
  gram[i * clients + j] = gram[j * clients + i] = value;
  // The diagonal tells: no product of two clients is larger than the larger of their own.
  if (out_of_range && i == j && value != 0 && !(value >= SMALLEST && value <= LARGEST)) *out_of_range = 1;
}

int most_blocks() { return 2 * multiprocessors(); }

template <typename T, int TILES>
const char* sum_part_by(const DeviceLists& lists, const Part& part, double* partials, double* gram, int* out_of_range,
                     const int* wanted, Stream stream) {
  const int blocks = lists.chunks < most_blocks() ? static_cast<int>(lists.chunks) : most_blocks();
  const size_t sums = sizeof(double) * THREADS * (TILES ? TILES * OF_SIDES : VALUES);
  const size_t deltas = sizeof(T) * part.slots() * part.pitch();
  const Shape shape = {static_cast<unsigned>(blocks), THREADS, sums + deltas};
  const char* error = launch(shape, stream, delta_gram_kernel<T, TILES>, lists, part, partials, wanted);
  if (error) return error;
  return launch({static_cast<unsigned>((part.tiles * part.values() + 7) / 8), 256}, stream, delta_gram_sums, part,
                partials, blocks, static_cast<int>(lists.clients), gram, out_of_range, wanted);
}

template <typename T>
const char* sum_part(const DeviceLists& lists, const Part& part, double* partials, double* gram, int* out_of_range,
                     const int* wanted, Stream stream) {
  if constexpr (sizeof(T) == 4) {
    if (part.tensor_cores) {
      const auto by = part.tiles <= 2 * WARPS ? sum_part_by<T, 2> : sum_part_by<T, 5>;
      return by(lists, part, partials, gram, out_of_range, wanted, stream);
    }
  }
  return sum_part_by<T, 0>(lists, part, partials, gram, out_of_range, wanted, stream);
}

template <typename T>
const char* sum_all(const DeviceLists& lists, double* partials, double* gram, int* out_of_range, const int* wanted,
                    Stream stream) {
  const bool tensor_cores = sizeof(T) == 4 && lists.clients >= LEAST_FOR_TENSOR_CORES;
  for (int64_t start = 0; start < lists.clients; start += PANEL) {
    const int64_t columns = lists.clients - start < PANEL ? lists.clients - start : PANEL;
    for (int64_t above = 0; above < start; above += RECTANGLE_ROWS) {
      const int64_t rows = start - above < RECTANGLE_ROWS ? start - above : RECTANGLE_ROWS;
      const Part part = part_of(above, rows, start, columns, false, tensor_cores);
      if (const char* error = sum_part<T>(lists, part, partials, gram, out_of_range, wanted, stream)) return error;
    }
    const Part part = part_of(start, columns, start, columns, true, tensor_cores);
    if (const char* error = sum_part<T>(lists, part, partials, gram, out_of_range, wanted, stream)) return error;
  }
  return nullptr;
}

}  // namespace

}  // namespace fedkernels::cuda

// The lists, a flag, and the partial sums.
extern "C" int64_t cuda_delta_gram_words(int64_t tensors, int64_t clients) {
  using namespace fedkernels::cuda;
  return words_of_lists(tensors, clients) + 1 + static_cast<int64_t>(most_blocks()) * MOST_VALUES;
}

extern "C" const char* cuda_delta_gram(const fedkernels::Array* arrays, const int64_t* sizes, int64_t tensors,
                                       int64_t clients, int64_t* words, double* gram,
                                       fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  int64_t* const flag = words + words_of_lists(tensors, clients);
  double* const partials = reinterpret_cast<double*>(flag + 1);
  int* const again = reinterpret_cast<int*>(flag);
  DeviceLists lists;
  const char* error = send_lists({arrays, sizes, tensors, clients, nullptr}, CHUNK, words, stream, &lists);
  if (!error) error = fill_zero(flag, sizeof(*flag), stream);
  if (error) return error;
  if (lists.chunks == 0) return fill_zero(gram, sizeof(double) * clients * clients, stream);
  if (lists.wide) return sum_all<double>(lists, partials, gram, nullptr, nullptr, stream);
  error = sum_all<float>(lists, partials, gram, again, nullptr, stream);
  return error ? error : sum_all<double>(lists, partials, gram, nullptr, again, stream);
}

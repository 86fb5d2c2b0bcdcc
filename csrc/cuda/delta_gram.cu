// A block goes through its share of the entries, some tens to hundreds at a time: it reads them once for all clients,
// while it still works on those before, and lays the differences into shared memory. There each thread multiplies the
// differences of eight clients with those of four others, so that twelve reads serve 32 products.
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
constexpr int PANEL = 104;           // clients in a triangle: 182 tiles
constexpr int RECTANGLE_ROWS = 40;   // beside PANEL columns: 130 tiles
constexpr int MOST_MEMBERS = 6;      // clients of which a thread reads entries
constexpr int RUN = 16;              // products that are summed, and such sums that are summed, in float32
constexpr int64_t CHUNK = 1536;      // a multiple of every depth
constexpr double SMALLEST = 1e-24, LARGEST = 1e37;  // of sums in float32

// A part of the matrix: the triangle of some clients, or the rectangle of `rows` with other `columns`.
struct Part {
  int row_start, rows, column_start, columns;
  bool triangle;
  int tiles;   // of ROWS x COLUMNS clients, one a thread
  int slices;  // threads that share a tile's entries
  int depth;   // entries that lie in shared memory at a time

  __host__ __device__ int row_groups() const { return (rows + ROWS - 1) / ROWS; }
  __host__ __device__ int column_groups() const { return (columns + COLUMNS - 1) / COLUMNS; }
  // Fours of clients in shared memory: the columns, of a triangle also as rows; then the rows of a rectangle.
  __host__ __device__ int column_fours() const { return triangle ? 2 * row_groups() : column_groups(); }
  __host__ __device__ int row_fours() const { return triangle ? 0 : 2 * row_groups(); }
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
  __device__ int slot(int member) const { return member < columns ? column_slot(member) : row_slot(member - columns); }

  // The first row and column of a tile. A triangle has those that reach above the diagonal.
  __device__ void tile(int index, int* row, int* column) const {
    int group = 0, first = 0, width = column_groups();
    while (index >= width - first) {
      index -= width - first;
      ++group;
      if (triangle) first += ROWS / COLUMNS;
    }
    *row = group * ROWS;
    *column = (first + index) * COLUMNS;
  }
};

Part part_of(int64_t row_start, int64_t rows, int64_t column_start, int64_t columns, bool triangle) {
  Part part = {static_cast<int>(row_start), static_cast<int>(rows), static_cast<int>(column_start),
               static_cast<int>(columns),   triangle,               0,
               1,                           0};
  for (int group = 0; group < part.row_groups(); ++group) {
    part.tiles += part.column_groups() - (triangle ? ROWS / COLUMNS * group : 0);
  }
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

// Partial sums of a part: partials[value * gridDim.x + block], VALUES for each tile. T is the type that it computes in;
// where `wanted` is given nothing is done but where it holds 1.
template <typename T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? BLOCKS : 1)
    delta_gram_kernel(const DeviceLists lists, const Part part, double* partials, const int* wanted) {
  if (wanted && *wanted == 0) return;
  T* const deltas = reinterpret_cast<T*>(dynamic_shared<double>() + VALUES * THREADS);
  const int thread = threadIdx.x, pitch = part.pitch(), units = part.depth / 4, lanes = THREADS / units;
  const int unit = thread % units, first_member = thread / units, members = part.members();
  for (int i = thread; i < 4 * (part.column_fours() + part.row_fours()) * pitch; i += THREADS) deltas[i] = 0;

  // What this thread multiplies.
  const int slice = thread / part.tiles;
  const bool active = slice < part.slices;
  int row = 0, column = 0;
  part.tile(thread % part.tiles, &row, &column);
  const int of_rows = part.row_slot(row) * pitch, of_columns = part.column_slot(column) * pitch;
  const int row_step = (part.triangle ? part.column_fours() : part.row_fours()) * pitch;
  const int column_step = part.column_fours() * pitch;

  T sums[ROWS][COLUMNS] = {}, of_runs[ROWS][COLUMNS] = {};  // the second where T is float
  double* const all = dynamic_shared<double>() + thread;   // [VALUES, THREADS]
#pragma unroll
  for (int v = 0; v < VALUES; ++v) all[v * THREADS] = 0;
  int products = 0;  // since the last sum in float64
  const auto end_run = [&] {
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
      of_runs[v / COLUMNS][v % COLUMNS] += sums[v / COLUMNS][v % COLUMNS];
      sums[v / COLUMNS][v % COLUMNS] = 0;
    }
  };
  const auto end_runs = [&] {
    products = 0;
#pragma unroll
    for (int v = 0; v < VALUES; ++v) {
      all[v * THREADS] += of_runs[v / COLUMNS][v % COLUMNS];
      of_runs[v / COLUMNS][v % COLUMNS] = 0;
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

  walk.enter(lists);
  for (bool there = false;; there = true) {
    const bool more = walk.chunk < lists.chunks;
    if (more) read();
    if (there && active) multiply();
    if (!more) break;
    __syncthreads();  // the tile before has been multiplied
    lay_down();
    __syncthreads();
    walk.advance(lists, part.depth);
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
  if (index < part.tiles * VALUES) {
    for (int block = threadIdx.x % 32; block < blocks; block += 32) {
      value += partials[static_cast<int64_t>(index) * blocks + block];
    }
  }
  value = warp_reduce(value, Sum());
  if (index >= part.tiles * VALUES || threadIdx.x % 32 != 0) return;
  int row, column;
  part.tile(index / VALUES, &row, &column);
  row += index % VALUES / COLUMNS;
  column += index % COLUMNS;
  if (row >= part.rows || column >= part.columns || (part.triangle && column < row)) return;
  const int64_t i = part.row_start + row, j = part.column_start + column;
  gram[i * clients + j] = gram[j * clients + i] = value;
  // The diagonal tells: no product of two clients is larger than the larger of their own.
  if (out_of_range && i == j && value != 0 && !(value >= SMALLEST && value <= LARGEST)) *out_of_range = 1;
}

int most_blocks() { return 2 * multiprocessors(); }

template <typename T>
const char* sum_part(const DeviceLists& lists, const Part& part, double* partials, double* gram, int* out_of_range,
                     const int* wanted, Stream stream) {
  const int blocks = lists.chunks < most_blocks() ? static_cast<int>(lists.chunks) : most_blocks();
  const size_t deltas = sizeof(T) * 4 * (part.column_fours() + part.row_fours()) * part.pitch();
  const Shape shape = {static_cast<unsigned>(blocks), THREADS, sizeof(double) * THREADS * VALUES + deltas};
  const char* error = launch(shape, stream, delta_gram_kernel<T>, lists, part, partials, wanted);
  if (error) return error;
  return launch({static_cast<unsigned>((part.tiles * VALUES + 7) / 8), 256}, stream, delta_gram_sums, part, partials,
                blocks, static_cast<int>(lists.clients), gram, out_of_range, wanted);
}

template <typename T>
const char* sum_all(const DeviceLists& lists, double* partials, double* gram, int* out_of_range, const int* wanted,
                    Stream stream) {
  for (int64_t start = 0; start < lists.clients; start += PANEL) {
    const int64_t columns = lists.clients - start < PANEL ? lists.clients - start : PANEL;
    for (int64_t above = 0; above < start; above += RECTANGLE_ROWS) {
      const int64_t rows = start - above < RECTANGLE_ROWS ? start - above : RECTANGLE_ROWS;
      const Part part = part_of(above, rows, start, columns, false);
      if (const char* error = sum_part<T>(lists, part, partials, gram, out_of_range, wanted, stream)) return error;
    }
    const Part part = part_of(start, columns, start, columns, true);
    if (const char* error = sum_part<T>(lists, part, partials, gram, out_of_range, wanted, stream)) return error;
  }
  return nullptr;
}

}  // namespace

}  // namespace fedkernels::cuda

// The lists, a flag, and the partial sums.
extern "C" int64_t cuda_delta_gram_words(int64_t tensors, int64_t clients) {
  using namespace fedkernels::cuda;
  return words_of_lists(tensors, clients) + 1 + static_cast<int64_t>(most_blocks()) * THREADS * VALUES;
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

// Before the products: maxima, column sums, then z, which is x and y side by side, scaled and centred. A block leaves
// its part of a sum in memory; the next kernel's blocks add the parts that they need, all in one order.
#include "cuda/linear_cka_large_parts.h"

namespace fedkernels::cuda {

namespace {

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

// Writes the matrices to z. `scales` has `pitch_of_scales` numbers for each problem, first those of the matrices. Where
// there is a kernel the second is the one beside x's, for `kernel_maxima`: `parts_of_kernel` for each problem, or none
// if the kernel is scaled itself.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    write_kernel(const CKAMatrices given, const T* maxima, const double* sums, const T* kernel_maxima,
                 int64_t parts_of_kernel, T* z, int64_t pitch, double* scales, int64_t pitch_of_scales) {
  SHARED(first_of, T[WIDTH]);
  SHARED(mean_of, T[WIDTH]);
  const Part part(given);
  const T scale = scale_for(part.largest(maxima));
  T beside = 1;
  if (kernel_maxima) {
    beside = scale_beside(block_largest(kernel_maxima + part.problem * parts_of_kernel, parts_of_kernel));
  }
  if (part.tile == 0 && part.chunk == 0 && threadIdx.x == 0) {
    double* const of_problem = scales + part.problem * pitch_of_scales;
    of_problem[part.matrix] = static_cast<double>(scale);
    if (kernel_maxima) of_problem[1] = static_cast<double>(beside);
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
    for (int e = 0; e < 4; ++e) four.values[e] = ((values[e] * scale - first[e]) - mean[e]) * beside;
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

// A kernel's entries, scaled; to be centred the first row is subtracted and then the first column. H(.)H is the same, a
// constant kernel becomes exactly 0, and nothing large cancels in the sums.
template <typename T>
struct KernelEntries {
  const Part& part;
  T scale;
  bool centered;
  double corner, first[4];

  __device__ KernelEntries(const CKAMatrices& kernel, const Part& part, const T* maxima)
      : part(part), scale(scale_for(part.largest(maxima))), centered(kernel.centered), corner(0), first{} {
    if (!centered) return;
    T values[4];
    part.read(values, 0);
#pragma unroll
    for (int e = 0; e < 4; ++e) first[e] = static_cast<double>(values[e] * scale);
    corner = first_of_row(0);
  }
  __device__ double first_of_row(int64_t row) const {
    return static_cast<double>(static_cast<T>(read_one(part.source, part.start + row * part.width)) * scale);
  }
  // What is to be subtracted from a row; every lane of the warp has the same.
  __device__ double shift(int64_t row) const { return centered ? first_of_row(row) - corner : 0; }
  __device__ double operator()(T value, int e, double shift) const {
    return (static_cast<double>(value * scale) - first[e]) - shift;
  }
};

// Of a kernel that is to be centred: column_sums[block, WIDTH] and row_sums[problem, tile, rows].
template <typename T>
__global__ void __launch_bounds__(THREADS)
    kernel_sums_kernel(const CKAMatrices kernel, const T* maxima, double* column_sums, double* row_sums) {
  const Part part(kernel);
  const KernelEntries<T> entries(kernel, part, maxima);
  const int count = part.count();
  double mine[4] = {};
  part.each_row<T>([&](int64_t row, const T(&values)[4]) {
    const double shift = entries.shift(row);
    double of_four = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const double entry = e < count ? entries(values[e], e, shift) : 0;
      mine[e] += entry;
      of_four += entry;
    }
    const double sum = warp_reduce(of_four, Sum());
    if (threadIdx.x % 32 == 0) row_sums[(part.problem * part.tiles + part.tile) * kernel.rows + row] = sum;
  });
  const double sum = add_warps(mine);
  if (threadIdx.x < WIDTH) column_sums[blockIdx.x * static_cast<int64_t>(WIDTH) + threadIdx.x] = sum;
}

// means[problem, 2, rows]: of the columns, then of the rows; totals[problem, tile]: the sum of WIDTH columns' means.
__global__ void __launch_bounds__(THREADS) means_kernel(const CKAMatrices kernel, const double* column_sums,
                                                        const double* row_sums, double* means, double* totals) {
  SHARED(of_warps, double[WARPS]);
  const Parts parts(kernel);
  const int64_t problem = blockIdx.x / parts.tiles, tile = blockIdx.x % parts.tiles, at = tile * WIDTH + threadIdx.x;
  const double rows = static_cast<double>(kernel.rows);
  double column = 0, row = 0;
  if (threadIdx.x < WIDTH && at < kernel.rows) {
    for (int64_t chunk = 0; chunk < parts.chunks; ++chunk) {
      column += column_sums[((problem * parts.tiles + tile) * parts.chunks + chunk) * WIDTH + threadIdx.x];
    }
    for (int64_t t = 0; t < parts.tiles; ++t) row += row_sums[(problem * parts.tiles + t) * kernel.rows + at];
    means[2 * problem * kernel.rows + at] = column / rows;
    means[(2 * problem + 1) * kernel.rows + at] = row / rows;
  }
  const double total = block_reduce(column / rows, of_warps, Sum());
  if (threadIdx.x == 0) totals[blockIdx.x] = total;
}

// squares[block]: of the scaled kernel's entries. If it is to be centred HKH is written to `centred`, scaled.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    write_kernel_kernel(const CKAMatrices kernel, const T* maxima, const double* means, const double* totals,
                        T* centred, double* squares, double* scales) {
  SHARED(of_warps, double[WARPS]);
  const Part part(kernel);
  const KernelEntries<T> entries(kernel, part, maxima);
  const int count = part.count();
  if (part.tile == 0 && part.chunk == 0 && threadIdx.x == 0) {
    scales[part.problem * KERNEL_SCALES + 2] = centred ? 1 : static_cast<double>(entries.scale);
  }
  const double* const of_columns = means + 2 * part.problem * kernel.rows;
  const double* const of_rows = of_columns + kernel.rows;
  double mean = 0, column_means[4] = {};
  if (centred) {
    mean = block_sum(totals + part.problem * part.tiles, part.tiles) / static_cast<double>(kernel.rows);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e < count) column_means[e] = of_columns[part.column + part.lane_column() + e];
    }
  }
  double square = 0;
  part.each_row<T>([&](int64_t row, const T(&values)[4]) {
    const double shift = entries.shift(row), row_mean = centred ? of_rows[row] - mean : 0;
    T* const to = centred + part.start + row * part.width + part.column + part.lane_column();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e >= count) continue;
      const T entry = static_cast<T>((entries(values[e], e, shift) - column_means[e]) - row_mean);
      square += static_cast<double>(entry) * static_cast<double>(entry);
      if (centred) to[e] = entry;
    }
  });
  square = block_reduce(square, of_warps, Sum());
  if (threadIdx.x == 0) squares[blockIdx.x] = square;
}

// A block for each problem.
__global__ void __launch_bounds__(THREADS)
    kernel_norm_kernel(const CKAMatrices kernel, const double* squares, double* scales) {
  const int64_t parts = Parts(kernel).of_problem();
  const double norm = block_sum(squares + blockIdx.x * parts, parts);
  if (threadIdx.x == 0) scales[blockIdx.x * static_cast<int64_t>(KERNEL_SCALES) + 3] = norm;
}

// ---- on the host ----

// Where the sums of some matrices lie in memory.
struct Memory {
  double *maxima, *sums, *squares, *row_sums, *means, *totals, *end;  // the last four are a kernel's

  Memory(const CKAMatrices& given, bool kernel, double* start) {
    const Parts parts(given);
    const int64_t blocks = given.problems * parts.of_problem();
    maxima = start;
    sums = maxima + blocks;
    squares = sums + (given.centered ? blocks * WIDTH : 0);
    row_sums = squares + (kernel ? blocks : 0);
    const int64_t centred = kernel && given.centered ? given.problems : 0;
    means = row_sums + centred * parts.tiles * given.rows;
    totals = means + centred * 2 * given.rows;
    end = totals + centred * parts.tiles;
  }
};

template <typename T>
const char* sum_columns(const CKAMatrices& given, const Memory& memory, Stream stream) {
  const int64_t blocks = given.problems * Parts(given).of_problem();
  if (!one_dimension(blocks)) return "too many matrices at once";
  T* const maxima = reinterpret_cast<T*>(memory.maxima);
  const char* error = launch(shape_of(blocks), stream, maxima_kernel<T>, given, maxima);
  if (error || !given.centered) return error;
  return launch(shape_of(blocks), stream, column_sums_kernel<T>, given, maxima, memory.sums);
}

template <typename T>
const char* prepare(const CKAMatrices& given, T* z, int64_t pitch, double* scales, double* start, Stream stream) {
  const Memory memory(given, false, start);
  if (const char* error = sum_columns<T>(given, memory, stream)) return error;
  return launch(shape_of(given.problems * Parts(given).of_problem()), stream, write_kernel<T>, given,
                reinterpret_cast<T*>(memory.maxima), memory.sums, nullptr, 0, z, pitch, scales, given.count);
}

// x and the kernel on their own, as one matrix each.
CKAMatrices one_of(const CKAMatrices& given, int index) {
  CKAMatrices one = given;
  one.count = 1;
  one.matrices[0] = given.matrices[index];
  one.widths[0] = given.widths[index];
  return one;
}

template <typename T>
const char* prepare_to_kernel(const CKAMatrices& given, T* z, T* centred, double* scales, double* start,
                              Stream stream) {
  const CKAMatrices x = one_of(given, 0), kernel = one_of(given, 1);
  const Memory of_x(x, false, start), of_kernel(kernel, true, of_x.end);
  const Parts parts(kernel);
  const int64_t blocks = kernel.problems * parts.of_problem();
  if (!one_dimension(blocks)) return "too many kernels at once";
  const char* error = sum_columns<T>(x, of_x, stream);
  T* const maxima = reinterpret_cast<T*>(of_kernel.maxima);
  if (!error) error = launch(shape_of(blocks), stream, maxima_kernel<T>, kernel, maxima);
  if (!error && kernel.centered) {
    error = launch(shape_of(blocks), stream, kernel_sums_kernel<T>, kernel, maxima, of_kernel.sums, of_kernel.row_sums);
    if (error) return error;
    error = launch(shape_of(kernel.problems * parts.tiles), stream, means_kernel, kernel, of_kernel.sums,
                   of_kernel.row_sums, of_kernel.means, of_kernel.totals);
  }
  if (!error) {
    error = launch(shape_of(blocks), stream, write_kernel_kernel<T>, kernel, maxima, of_kernel.means, of_kernel.totals,
                   kernel.centered ? centred : nullptr, of_kernel.squares, scales);
  }
  if (!error) {
    error = launch(shape_of(kernel.problems), stream, kernel_norm_kernel, kernel, of_kernel.squares, scales);
  }
  if (error) return error;
  return launch(shape_of(x.problems * Parts(x).of_problem()), stream, write_kernel<T>, x,
                reinterpret_cast<T*>(of_x.maxima), of_x.sums, maxima, kernel.centered ? 0 : parts.of_problem(), z,
                x.widths[0], scales, KERNEL_SCALES);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_linear_cka_prepare_doubles(const fedkernels::cuda::CKAMatrices* given) {
  double* const start = nullptr;
  return fedkernels::cuda::Memory(*given, false, start).end - start;
}

extern "C" int64_t cuda_linear_cka_prepare_to_kernel_doubles(const fedkernels::cuda::CKAMatrices* given) {
  using namespace fedkernels::cuda;
  double* const start = nullptr;
  return Memory(one_of(*given, 1), true, Memory(one_of(*given, 0), false, start).end).end - start;
}

extern "C" const char* cuda_linear_cka_prepare(const fedkernels::cuda::CKAMatrices* given, void* z, int64_t pitch,
                                               double* scales, double* memory, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (given->problems == 0) return nullptr;
  return given->wide ? prepare(*given, static_cast<double*>(z), pitch, scales, memory, stream)
                     : prepare(*given, static_cast<float*>(z), pitch, scales, memory, stream);
}

extern "C" const char* cuda_linear_cka_prepare_to_kernel(const fedkernels::cuda::CKAMatrices* given, void* z,
                                                         void* centred, double* scales, double* memory,
                                                         fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (given->problems == 0) return nullptr;
  if (given->wide) {
    return prepare_to_kernel(*given, static_cast<double*>(z), static_cast<double*>(centred), scales, memory, stream);
  }
  return prepare_to_kernel(*given, static_cast<float*>(z), static_cast<float*>(centred), scales, memory, stream);
}

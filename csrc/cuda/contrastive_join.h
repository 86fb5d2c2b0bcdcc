// What the contrastive kernels share: a pass as they see it, and the kernel that ends it.
#pragma once

#include "cuda/contrastive.h"
#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fedkernels::cuda {

constexpr double LOG2_E = 1.4426950408889634;

inline __host__ __device__ int64_t up(int64_t count, int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

__device__ inline float power_of_two(float x) { return exp2f(x); }
__device__ inline double power_of_two(double x) { return exp2(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// Below every logit, yet finite: where nothing has been met, exp(-inf - lowest) is 0 and not NaN.
template <typename Number>
__device__ inline Number lowest() {
  return static_cast<Number>(sizeof(Number) == 8 ? -1.7e308 : -3e38);
}

// Entries of the matrices; numbers that the sums and the gradient are.
template <typename Entry, typename Number>
struct Arguments {
  const Entry *rows, *columns;
  int row_count, column_count, width;
  Number temperature, scale;  // scale: log2(e) / temperature
  int shift, positives;
  bool leave_out_self, given;
  const Number *row_largest, *row_share, *column_largest, *column_share;
  const Number *row_weight, *column_weight, *weight_unit;
  Number weight_scale;                 // of the second pass: the gradient comes multiplied by it
  int parts, tiles_of_part;            // of the columns; tiles of columns in each
  Number *largest, *total, *positive;  // [parts, row_count]
  Number* gradient;                    // [parts, row_count, width], or null
  bool vectors;                        // rows and columns lie so that 16 bytes can be copied at a time
};

template <typename Entry, typename Number>
__device__ inline int positive_of(const Arguments<Entry, Number>& pass, int row) {
  int column = row + pass.shift;
  if (pass.leave_out_self && column >= pass.column_count) column -= pass.column_count;
  return column < pass.positives ? column : -1;
}

// Is there a gradient that the parts cannot be summed in? They have memory then, of one part too.
template <typename Number>
bool has_gradients_of_parts(const ContrastivePass& given, int parts) {
  const DType of_sums = sizeof(Number) == 8 ? DType::f64 : DType::f32;
  return given.gradient.data && (parts > 1 || given.gradient.dtype != of_sums);
}

// The pass in blocks that take `of_tile` columns at a time, shared out into at most `parts`.
template <typename Entry, typename Number>
Arguments<Entry, Number> arguments_of(const ContrastivePass& given, int of_tile, int parts, void* memory) {
  Arguments<Entry, Number> pass = {};
  pass.rows = static_cast<const Entry*>(given.rows.data);
  pass.columns = static_cast<const Entry*>(given.columns.data);
  pass.row_count = static_cast<int>(given.row_count);
  pass.column_count = static_cast<int>(given.column_count);
  pass.width = static_cast<int>(given.width);
  pass.temperature = static_cast<Number>(given.temperature);
  pass.scale = static_cast<Number>(LOG2_E / given.temperature);
  pass.shift = static_cast<int>(given.shift);
  pass.positives = static_cast<int>(given.positives);
  pass.leave_out_self = given.leave_out_self;
  pass.given = given.given;
  pass.row_largest = static_cast<const Number*>(given.row_largest);
  pass.row_share = static_cast<const Number*>(given.row_share);
  pass.column_largest = static_cast<const Number*>(given.column_largest);
  pass.column_share = static_cast<const Number*>(given.column_share);
  pass.row_weight = static_cast<const Number*>(given.row_weight);
  pass.column_weight = static_cast<const Number*>(given.column_weight);
  pass.weight_unit = static_cast<const Number*>(given.weight_unit);
  pass.weight_scale = 1;
  const int tiles = (pass.column_count + of_tile - 1) / of_tile;
  pass.tiles_of_part = (tiles + parts - 1) / parts;
  pass.parts = (tiles + pass.tiles_of_part - 1) / pass.tiles_of_part;
  Number* const at = static_cast<Number*>(memory);
  const int64_t sums = static_cast<int64_t>(pass.parts) * pass.row_count;
  pass.largest = at;
  pass.total = at + sums;
  pass.positive = at + 2 * sums;
  const bool of_parts = has_gradients_of_parts<Number>(given, pass.parts);
  pass.gradient = of_parts ? at + 3 * sums : static_cast<Number*>(given.gradient.data);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  pass.vectors = given.width * sizeof(Entry) % 16 == 0 && aligned(pass.rows) && aligned(pass.columns);
  return pass;
}

// Into how many parts the columns are shared out. A multiprocessor holds one block, for its registers, and blocks
// beyond a multiple of the multiprocessors cost a whole wave more: what is least is the waves times the tiles that a
// block goes through, its start counted as one. Each part has sums and gradients of its own in memory, so there are no
// more than fill the device, and not two where the rows alone make more than two waves.
inline int parts_of(int64_t row_blocks, int64_t column_tiles) {
  const int64_t at_a_time = multiprocessors(), fill = (at_a_time + row_blocks - 1) / row_blocks;
  const int64_t useful = fill == 1 && row_blocks < 2 * at_a_time ? 2 : fill;
  const int64_t of_tiles = (column_tiles + 3) / 4;  // a part has some tiles
  int64_t best = 1, least = 0;
  for (int64_t parts = 1; parts <= useful && parts <= of_tiles && parts <= 16; ++parts) {
    const int64_t waves = (row_blocks * parts + at_a_time - 1) / at_a_time;
    const int64_t cost = waves * ((column_tiles + parts - 1) / parts + 1);
    if (parts > 1 && cost >= least) continue;
    least = cost;
    best = parts;
  }
  return static_cast<int>(best);
}

// Numbers of memory that `parts` parts write.
template <typename Number>
int64_t numbers_of_parts(const ContrastivePass& given, int parts) {
  return parts * given.row_count * (3 + (has_gradients_of_parts<Number>(given, parts) ? given.width : 0));
}

namespace {

// One block a row: joins the parts in their order. Precision::wide makes a number of an entry.
template <typename Precision, typename Entry, typename Number>
__global__ void __launch_bounds__(128)
    join_kernel(Arguments<Entry, Number> pass, Number* row_largest, Number* row_share, Number* losses,
                Array gradient) {
  const int row = blockIdx.x, positive = positive_of(pass, row);
  Number top = lowest<Number>(), share = 1 / pass.weight_scale, times = 0;
  Number by = pass.weight_unit ? *pass.weight_unit : Number(1);
  if (!pass.given) {
    for (int part = 0; part < pass.parts; ++part) {
      const Number here = pass.largest[part * pass.row_count + row];
      top = here > top ? here : top;
    }
    Number total = 0, logit = 0;
    for (int part = 0; part < pass.parts; ++part) {
      const int at = part * pass.row_count + row;
      total += pass.total[at] * power_of_two((pass.largest[at] - top) * pass.scale);
      logit += pass.positive[at];  // 0 but for the part that holds it
    }
    share = 1 / total;
    times = 1;
    const Number weight = pass.row_weight ? pass.row_weight[row] : Number(1);
    by *= weight;
    if (threadIdx.x == 0) {
      row_largest[row] = top;
      row_share[row] = share * weight;
      const Number sum = total == 0 ? static_cast<Number>(__uint_as_float(0x7fffffff)) : total;
      losses[row] = logarithm(sum) + (top - logit) / pass.temperature;
    }
  } else {
    if (pass.row_share) times += pass.row_weight ? pass.row_weight[row] : Number(1);
    if (pass.column_share && positive >= 0) times += pass.column_weight ? pass.column_weight[positive] : Number(1);
  }
  if (!gradient.data) return;
  for (int column = threadIdx.x; column < pass.width; column += blockDim.x) {
    Number sum = 0;
    for (int part = 0; part < pass.parts; ++part) {
      const int64_t at = static_cast<int64_t>(part) * pass.row_count + row;
      const Number factor = pass.given ? 1 : power_of_two((pass.largest[at] - top) * pass.scale);
      sum += pass.gradient[at * pass.width + column] * factor;
    }
    const Number taken =
        positive < 0 ? 0 : times * Precision::wide(pass.columns[static_cast<int64_t>(positive) * pass.width + column]);
    write_one(gradient, static_cast<int64_t>(row) * pass.width + column, (sum * share - taken) / pass.temperature * by);
  }
}

}  // namespace

template <typename Precision, typename Entry, typename Number>
const char* join(const Arguments<Entry, Number>& pass, const ContrastivePass& given, Stream stream) {
  return launch({dim3(static_cast<unsigned>(pass.row_count)), dim3(128)}, stream, join_kernel<Precision, Entry, Number>,
                pass, static_cast<Number*>(given.row_largest), static_cast<Number*>(given.row_share),
                static_cast<Number*>(given.losses), given.gradient);
}

}  // namespace fedkernels::cuda

// The algorithm is that of fedkernels/reference/unbalanced_ot.py, step for step and in float64: the whole solve is one
// launch. What is different is the work of a step, as in csrc/cpu/unbalanced_ot.cpp: the quadratic sees the plan only
// through its row and column sums, so one pass over the entries forms all that the line search and the restart need.
// An accepted step forms its entries a second time instead of keeping them.
//
// To 128 x 128 a problem is one block's: a warp holds eight rows, half of the plan in registers, which is what they have
// room for, the rest and the point with momentum in shared memory. Larger ones, and FedU2's steepest descent, are a
// team's: blocks that run at the same time and wait for each other, with the entries in global memory, where the
// second-level cache holds them.
#include "cuda/unbalanced_ot.h"

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int GROUP = 8;         // rows that a warp sums together
constexpr int BLOCK_LIMIT = 128, BLOCK_THREADS = BLOCK_LIMIT / GROUP * 32;
constexpr int COLUMNS = BLOCK_LIMIT / 32;      // of a lane
constexpr int IN_REGISTERS = COLUMNS / 2;      // columns of a lane of which the plan is kept in registers
constexpr int CHECK_EVERY = 10;  // as in the reference
constexpr double TINY = 2.2250738585072014e-308;

__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000); }
__device__ inline double not_a_number() { return __longlong_as_double(0x7ff8000000000000); }
__device__ inline double square(double x) { return x * x; }
__device__ inline double least(double x, double y) { return y < x ? y : x; }
__device__ inline double positive_part(double x) { return x > 0 ? x : 0; }

// FISTA with a backtracking line search and adaptive restart. Every thread holds the same.
struct Search {
  double curvature, momentum, weight;  // at first tau_a + tau_b, that of a single entry, 1 and 0

  // Of a move: `bend` = tau_a |move 1|^2 + tau_b |move' 1|^2, its square, and its product with the plan's advance.
  __device__ bool accept(double single, double bend, double squares, double advances) {
    const bool good = bend <= curvature * squares;
    if (good) {
      const bool restart = advances < 0;  // the momentum points uphill
      const double next = (1 + sqrt(1 + 4 * square(momentum))) / 2;
      weight = restart ? 0 : (momentum - 1) / next;
      momentum = restart ? 1 : next;
    }
    curvature *= good ? 0.9 : 2;
    curvature = curvature < 1e-3 * single ? 1e-3 * single : curvature;
    return good;
  }
};

// The best plan so far and the largest lower bound. Every thread holds the same.
struct Certificate {
  double value, size, bound, gap;

  __device__ bool improves(double linear, double of_size, double penalties) {
    if (!(linear + penalties < value)) return false;
    value = linear + penalties;
    size = of_size + penalties;
    return true;
  }
  __device__ void raise(double lower) {
    bound = lower > bound ? lower : bound;
    gap = (value - bound) / (size > TINY ? size : TINY);
    gap = gap > 0 ? gap : 0;
  }
};

// values[r] of all lanes reduced -> lane l has that of r = l / (32 / COUNT). An exchange halves what a lane still holds.
template <int COUNT, typename Operation>
__device__ __forceinline__ double reduce_rows(double (&values)[COUNT], Operation operation) {
  int offset = 16;
#pragma unroll
  for (int half = COUNT / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = threadIdx.x & offset;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const double sent = upper ? values[k] : values[k + half], kept = upper ? values[k + half] : values[k];
      values[k] = operation(kept, __shfl_xor_sync(ALL_LANES, sent, offset));
    }
  }
  double value = values[0];
#pragma unroll
  for (; offset > 0; offset /= 2) value = operation(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// Every thread gets the block's sums; `of_warps` is shared memory, [COUNT, 32].
template <int COUNT>
__device__ inline void sum_over_block(double (&values)[COUNT], double* of_warps) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) values[k] = warp_reduce(values[k], Sum());
  __syncthreads();  // earlier sums have been read
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) of_warps[k * 32 + threadIdx.x / 32] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    values[k] = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) values[k] += of_warps[k * 32 + warp];
  }
}

// Of an array in float32 or float64, which the costs and the plans are.
__device__ inline double read_wide(const Array& source, int64_t index) {
  return source.dtype == DType::f64 ? __ldg(static_cast<const double*>(source.data) + index)
                                    : static_cast<double>(__ldg(static_cast<const float*>(source.data) + index));
}
__device__ inline void write_wide(const Array& target, int64_t index, double value) {
  if (target.dtype == DType::f64) {
    static_cast<double*>(target.data)[index] = value;
  } else {
    static_cast<float*>(target.data)[index] = static_cast<float>(value);
  }
}

struct Pair {
  double of_row, of_column;
};

// ---- one problem, one block ----

// The vectors of a problem over its rows and over its columns.
enum Vector { MASSES, DUALS, OF_PLAN, OF_POINT, OF_TRIAL, OF_BEST, ROOM, VECTORS };

// Doubles of shared memory: the warps' scalars, the vectors and the warps' part of each column; then, where there is room,
// the point and what the registers do not hold of the plan.
struct BlockMemory {
  int warps;

  static constexpr int OF_WARPS = 2 * 32, FOUND = 8, FIXED = OF_WARPS + FOUND + 2 * VECTORS * BLOCK_LIMIT;
  static constexpr int POINT = GROUP * COLUMNS * 32, REST = GROUP * (COLUMNS - IN_REGISTERS) * 32;  // of a warp
  __host__ __device__ int partial() const { return BLOCK_LIMIT * warps; }
  __host__ __device__ int point() const { return POINT * warps; }
  __host__ __device__ int rest() const { return REST * warps; }
};

// Lane l of warp w holds rows 8 w .. 8 w + 7 and columns l, l + 32, .. of the plan.
template <typename Cost>
struct Block {
  const Transport& t;
  const int rows, columns, threads, warp, lane;
  // Of this thread, 32 apart: a distance that the compiler knows costs no registers.
  double *const point, *const rest;
  double plan[GROUP][IN_REGISTERS];

  __device__ __forceinline__ Block(const Transport& t, double* point, double* rest)
      : t(t),
        rows(static_cast<int>(t.rows)),
        columns(static_cast<int>(t.columns)),
        threads(blockDim.x),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        point(point + warp * BlockMemory::POINT + lane),
        rest(rest + warp * BlockMemory::REST + lane) {}

  // Shared memory is named by its place and not held in pointers, which would take the registers of the plan.
  static __device__ __forceinline__ double* of_warps() { return dynamic_shared<double>(); }
  static __device__ __forceinline__ double* by_row(int vector) {
    return dynamic_shared<double>() + BlockMemory::OF_WARPS + BlockMemory::FOUND + vector * BLOCK_LIMIT;
  }
  static __device__ __forceinline__ double* by_column(int vector) { return by_row(VECTORS + vector); }
  static __device__ __forceinline__ Certificate& found() {
    return *reinterpret_cast<Certificate*>(dynamic_shared<double>() + BlockMemory::OF_WARPS);
  }
  static __device__ __forceinline__ Search& search() {
    return *reinterpret_cast<Search*>(dynamic_shared<double>() + BlockMemory::OF_WARPS + 4);
  }
  static __device__ __forceinline__ double* partial() { return dynamic_shared<double>() + BlockMemory::FIXED; }

  // This thread's part of the matrix, looked up for each pass.
  struct Entries {
    const Cost* cost;          // of the problem: one address for the whole block, which takes no register of a thread
    int first, rows, columns;  // the first entry, and what is left of rows and columns from it on

    __device__ __forceinline__ bool inside(int r, int c) const { return r < rows && c * 32 < columns; }
  };
  __device__ __forceinline__ Entries entries() const {
    return {static_cast<const Cost*>(t.cost.data) + static_cast<int64_t>(blockIdx.x) * (rows * columns),
            keep_here(warp * GROUP * columns + lane), keep_here(rows - warp * GROUP), keep_here(columns - lane)};
  }
  // Outside the matrix a pair is forbidden.
  __device__ __forceinline__ double cost_at(const Entries& at, int r, int c) const {
    return at.inside(r, c) ? static_cast<double>(__ldg(at.cost + (at.first + r * columns + c * 32))) : infinite();
  }
  __device__ __forceinline__ double& plan_at(int r, int c) {
    return c < IN_REGISTERS ? plan[r][c] : rest[(r * (COLUMNS - IN_REGISTERS) + c - IN_REGISTERS) * 32];
  }
  __device__ __forceinline__ double& point_at(int r, int c) { return point[(r * COLUMNS + c) * 32]; }
  __device__ __forceinline__ double gradient(const Entries& at, int r, int c) const {
    return cost_at(at, r, c) - by_row(DUALS)[warp * GROUP + r] - by_column(DUALS)[c * 32 + lane];
  }

  // Calls body(r, c) for all entries of this thread.
  template <typename Body>
  __device__ __forceinline__ void for_entries(const Body& body) {
#pragma unroll
    for (int r = 0; r < GROUP; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) body(r, c);
    }
  }

  // entry(r, c) -> a Pair. Reduces the first over each row, into by_row(to), and the second over the warp's part of each
  // column, into partial(), for after a barrier. Half of the rows at a time, for the sake of registers.
  template <typename Operation, typename Entry>
  __device__ __forceinline__ void reduce_entries(double neutral, Operation operation, int to, const Entry& entry) {
    constexpr int HALF = GROUP / 2;
    double of_columns[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) of_columns[c] = neutral;
#pragma unroll
    for (int first = 0; first < GROUP; first += HALF) {
      double of_rows[HALF];
#pragma unroll
      for (int r = 0; r < HALF; ++r) {
        of_rows[r] = neutral;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const Pair pair = entry(first + r, c);
          of_rows[r] = operation(of_rows[r], pair.of_row);
          of_columns[c] = operation(of_columns[c], pair.of_column);
        }
      }
      const double value = reduce_rows(of_rows, operation);
      if (lane % (32 / HALF) == 0) by_row(to)[warp * GROUP + first + lane / (32 / HALF)] = value;
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) partial()[warp * BLOCK_LIMIT + c * 32 + lane] = of_columns[c];
  }
  template <typename Operation>
  __device__ __forceinline__ double over_warps(int column, Operation operation) const {
    double value = partial()[column];
    for (int w = 1; w < threads / 32; ++w) value = operation(value, partial()[w * BLOCK_LIMIT + column]);
    return value;
  }

  // Calls body(i), body(j) for this thread's part of the vectors.
  template <typename Body>
  __device__ __forceinline__ void for_rows(const Body& body) {
    for (int i = threadIdx.x; i < GROUP * threads / 32; i += threads) body(i);
  }
  template <typename Body>
  __device__ __forceinline__ void for_columns(const Body& body) {
    for (int j = threadIdx.x; j < BLOCK_LIMIT; j += threads) body(j);
  }

  __device__ __forceinline__ void write_plan() {
    const Entries matrix = entries();
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (rows * columns) + matrix.first;
    for_entries([&](int r, int c) {
      if (matrix.inside(r, c)) write_wide(t.plan, first + r * columns + c * 32, plan_at(r, c));
    });
  }

  // The largest u for v and v for u: min_j(cost_ij - v_j) and min_i(cost_ij - u_i), at most tau_a a_i and tau_b b_j.
  __device__ __forceinline__ void largest_feasible(int from, int to) {
    const Entries matrix = entries();
    reduce_entries(infinite(), Least(), to, [&](int r, int c) -> Pair {
      const double here = cost_at(matrix, r, c);
      return {here - by_column(from)[c * 32 + lane], here - by_row(from)[warp * GROUP + r]};
    });
    __syncthreads();
    for_rows([&](int i) { by_row(to)[i] = least(t.tau_a * by_row(MASSES)[i], by_row(to)[i]); });
    for_columns([&](int j) { by_column(to)[j] = least(t.tau_b * by_column(MASSES)[j], over_warps(j, Least())); });
    __syncthreads();
  }

  // This thread's parts.
  __device__ __forceinline__ double dual_part(int at_u, int at_v) {
    double part = 0;
    for_rows([&](int i) { const double here = by_row(at_u)[i];
      if (i < rows) part += by_row(MASSES)[i] * here - square(here) / (2 * t.tau_a); });
    for_columns([&](int j) { const double here = by_column(at_v)[j];
      if (j < columns) part += by_column(MASSES)[j] * here - square(here) / (2 * t.tau_b); });
    return part;
  }
  __device__ __forceinline__ double penalties_part() {
    double part = 0;
    for_rows([&](int i) { part += t.tau_a / 2 * square(by_row(OF_PLAN)[i] - by_row(MASSES)[i]); });
    for_columns([&](int j) { part += t.tau_b / 2 * square(by_column(OF_PLAN)[j] - by_column(MASSES)[j]); });
    return part;
  }

  __device__ __forceinline__ void step() {
    // trial = max(0, point - gradient / curvature), of which only sums are kept.
    const double length = 1 / search().curvature;
    Entries matrix = entries();
    double moved[2] = {};
    reduce_entries(0, Sum(), OF_TRIAL, [&](int r, int c) -> Pair {
      const double at = point_at(r, c), next = positive_part(at - length * gradient(matrix, r, c)), move = next - at;
      moved[0] += square(move);
      moved[1] += move * (next - plan_at(r, c));
      return {next, next};
    });
    sum_over_block(moved, of_warps());
    double bend[1] = {};
    for_columns([&](int j) {
      by_column(OF_TRIAL)[j] = over_warps(j, Sum());
      bend[0] += t.tau_b * square(by_column(OF_TRIAL)[j] - by_column(OF_POINT)[j]);
    });
    for_rows([&](int i) { bend[0] += t.tau_a * square(by_row(OF_TRIAL)[i] - by_row(OF_POINT)[i]); });
    sum_over_block(bend, of_warps());
    Search now = search();
    const bool good = now.accept(t.tau_a + t.tau_b, bend[0], moved[0], moved[1]);
    __syncthreads();
    if (threadIdx.x == 0) search() = now;
    if (!good) return __syncthreads();

    const double weight = now.weight;
    matrix = entries();
    for_entries([&](int r, int c) {
      double& at = point_at(r, c);
      const double next = positive_part(at - length * gradient(matrix, r, c));
      at = next + weight * (next - plan_at(r, c));
      plan_at(r, c) = next;
    });
    __syncthreads();  // u and v have been read
    for_rows([&](int i) {
      by_row(OF_POINT)[i] = by_row(OF_TRIAL)[i] + weight * (by_row(OF_TRIAL)[i] - by_row(OF_PLAN)[i]);
      by_row(OF_PLAN)[i] = by_row(OF_TRIAL)[i];
      by_row(DUALS)[i] = t.tau_a * (by_row(MASSES)[i] - by_row(OF_POINT)[i]);
    });
    for_columns([&](int j) {
      by_column(OF_POINT)[j] = by_column(OF_TRIAL)[j] + weight * (by_column(OF_TRIAL)[j] - by_column(OF_PLAN)[j]);
      by_column(OF_PLAN)[j] = by_column(OF_TRIAL)[j];
      by_column(DUALS)[j] = t.tau_b * (by_column(MASSES)[j] - by_column(OF_POINT)[j]);
    });
    __syncthreads();
  }

  __device__ __forceinline__ void check() {
    const Entries matrix = entries();
    double linear[2] = {};  // <cost, plan> and <|cost|, plan>; a forbidden entry costs 0
    for_entries([&](int r, int c) {
      const double here = plan_at(r, c) > 0 ? cost_at(matrix, r, c) * plan_at(r, c) : 0;
      linear[0] += here;
      linear[1] += fabs(here);
    });
    sum_over_block(linear, of_warps());
    double penalties[1] = {penalties_part()};
    sum_over_block(penalties, of_warps());
    Certificate now = found();
    if (now.improves(linear[0], linear[1], penalties[0])) {
      write_plan();
      for_rows([&](int i) { by_row(OF_BEST)[i] = by_row(OF_PLAN)[i]; });
      for_columns([&](int j) { by_column(OF_BEST)[j] = by_column(OF_PLAN)[j]; });
    }
    // The dual value of the plan's u and v, made feasible by shrinking either first. OF_TRIAL is free until the next step.
    for_rows([&](int i) { by_row(OF_TRIAL)[i] = t.tau_a * (by_row(MASSES)[i] - by_row(OF_PLAN)[i]); });
    for_columns([&](int j) { by_column(OF_TRIAL)[j] = t.tau_b * (by_column(MASSES)[j] - by_column(OF_PLAN)[j]); });
    __syncthreads();
    if (threadIdx.x == 0) found() = now;
#pragma unroll 1
    for (int round = 0; round < 2; ++round) largest_feasible(round ? ROOM : OF_TRIAL, round ? OF_TRIAL : ROOM);
    double bounds[2] = {dual_part(ROOM, OF_TRIAL), dual_part(OF_TRIAL, ROOM)};
    sum_over_block(bounds, of_warps());
    now = found();
    now.raise(bounds[0] > bounds[1] ? bounds[0] : bounds[1]);
    __syncthreads();
    if (threadIdx.x == 0) found() = now;
    __syncthreads();
  }

  __device__ __forceinline__ void solve() {
    const int64_t problem = blockIdx.x;
    bool bad = false, pays = false;
    for_rows([&](int i) {
      by_row(MASSES)[i] = i < rows ? read_one(t.a, problem * rows + i) : 0;
      bad |= !(fabs(by_row(MASSES)[i]) < infinite());
      by_row(OF_PLAN)[i] = by_row(OF_POINT)[i] = by_row(OF_BEST)[i] = 0;
      by_row(DUALS)[i] = t.tau_a * by_row(MASSES)[i];
    });
    for_columns([&](int j) {
      by_column(MASSES)[j] = j < columns ? read_one(t.b, problem * columns + j) : 0;
      bad |= !(fabs(by_column(MASSES)[j]) < infinite());
      by_column(OF_PLAN)[j] = by_column(OF_POINT)[j] = by_column(OF_BEST)[j] = 0;
      by_column(DUALS)[j] = t.tau_b * by_column(MASSES)[j];
    });
    __syncthreads();
    const Entries matrix = entries();
    for_entries([&](int r, int c) {
      const double here = cost_at(matrix, r, c);
      bad |= !(here > -infinite());
      pays |= by_row(DUALS)[warp * GROUP + r] + by_column(DUALS)[c * 32 + lane] - here > 0;
      plan_at(r, c) = 0;
      point_at(r, c) = 0;
    });
    bad = __syncthreads_or(bad);
    pays = __syncthreads_or(pays);
    const double nan = not_a_number();
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * columns; index += threads) {
      write_wide(t.plan, problem * rows * columns + index, bad ? nan : 0);
    }
    double start[1] = {penalties_part()};
    sum_over_block(start, of_warps());
    if (threadIdx.x == 0) {
      found() = {start[0], start[0], -infinite(), bad ? nan : pays ? infinite() : 0};
      search() = {t.tau_a + t.tau_b, 1, 0};
    }
    __syncthreads();
    int iteration = 0;
    while (iteration < t.max_iterations && found().gap > t.tol) {
      step();
      ++iteration;
      if (iteration % CHECK_EVERY == 0 || iteration == t.max_iterations) check();
    }

    __syncthreads();
    const bool hopeless = found().gap != found().gap;  // `bad`, which no register had to hold meanwhile
    double mass[1] = {};
    for_rows([&](int i) {
      if (i < rows) t.u[problem * rows + i] = hopeless ? not_a_number() : t.tau_a * (by_row(MASSES)[i] - by_row(OF_BEST)[i]);
      mass[0] += by_row(OF_BEST)[i];
    });
    for_columns([&](int j) {
      if (j < columns) t.v[problem * columns + j] = hopeless ? not_a_number() : t.tau_b * (by_column(MASSES)[j] - by_column(OF_BEST)[j]);
    });
    sum_over_block(mass, of_warps());
    if (threadIdx.x == 0) {
      t.value[problem] = hopeless ? not_a_number() : found().value;
      t.mass[problem] = hopeless ? not_a_number() : mass[0];
      t.gap[problem] = found().gap;
      t.iterations[problem] = iteration;
    }
  }
};

template <typename Cost>
__global__ void __launch_bounds__(BLOCK_THREADS, 1) solve_in_block(const Transport t, double* points, double* rests) {
  // Memory that is not given is shared.
  const BlockMemory memory = {static_cast<int>(blockDim.x) / 32};
  double* const shared = dynamic_shared<double>() + BlockMemory::FIXED + memory.partial();
  double* const rest = points ? shared : shared + memory.point();
  const int64_t problem = blockIdx.x;
  Block<Cost> solver(t, points ? points + problem * memory.point() : shared,
                              rests ? rests + problem * memory.rest() : rest);
  solver.solve();
}

// ---- one problem, a team of blocks ----

constexpr int TEAM_THREADS = 256, TEAM_WARPS = TEAM_THREADS / 32;
constexpr int64_t MOST_BLOCKS = 32;
constexpr int MOST_SUMS = 3;

struct TeamSize {
  int64_t blocks, teams;

  // Doubles of memory for each team.
  __host__ __device__ int64_t words(const Transport& t) const {
    return 2 * t.rows * t.columns + 8 * t.rows + (9 * t.columns + 2 * MOST_SUMS) * blocks + t.columns;
  }
};

// The groups of eight rows are shared out to the blocks, a group's columns to the threads: a thread works on the same
// entries all the time. Of vectors over the rows a block uses its own rows only; of those over the columns each has a copy,
// and the copies are equal. What is for all blocks is written between two barriers and read by __ldcg.
struct Team {
  const Transport& t;
  const int64_t rows, columns, problem, blocks, rank, groups, first;  // first: entry of all problems' matrices
  unsigned* counter;
  double* of_warps;   // shared memory, [MOST_SUMS, 32]
  double* of_groups;  // shared memory, [TEAM_WARPS, GROUP]
  double *plan, *point;
  double *a, *u, *plan_rows, *point_rows, *trial_rows, *best_rows, *room_rows, *room_rows2;
  double *b, *v, *plan_columns, *point_columns, *trial_columns, *best_columns, *room_columns, *room_columns2, *partial;
  double *reduced, *sums;  // for all blocks: [columns], [2, blocks, MOST_SUMS]
  int turn = 0;

  __device__ Team(const Transport& t, const TeamSize& size, int64_t problem, double* memory, unsigned* counter,
                  double* of_warps, double* of_groups)
      : t(t),
        rows(t.rows),
        columns(t.columns),
        problem(problem),
        blocks(size.blocks),
        rank(blockIdx.x % size.blocks),
        groups((t.rows + GROUP - 1) / GROUP),
        first(problem * t.rows * t.columns),
        counter(counter),
        of_warps(of_warps),
        of_groups(of_groups) {
    const auto take = [&](int64_t count) {
      double* start = memory;
      memory += count;
      return start;
    };
    const auto copy = [&] { return take(columns * blocks) + rank * columns; };
    plan = take(rows * columns);
    point = take(rows * columns);
    a = take(rows), u = take(rows), plan_rows = take(rows), point_rows = take(rows);
    trial_rows = take(rows), best_rows = take(rows), room_rows = take(rows), room_rows2 = take(rows);
    b = copy(), v = copy(), plan_columns = copy(), point_columns = copy(), trial_columns = copy();
    best_columns = copy(), room_columns = copy(), room_columns2 = copy(), partial = copy();
    reduced = take(columns);
    sums = take(2 * MOST_SUMS * blocks);
  }

  __device__ void wait() { barrier_of_blocks(counter, static_cast<unsigned>(blocks)); }

  // Calls body(i) for this thread's part of the block's rows.
  template <typename Body>
  __device__ void for_rows(const Body& body) {
#pragma unroll 1
    for (int64_t k = threadIdx.x; k < (groups - rank + blocks - 1) / blocks * GROUP; k += TEAM_THREADS) {
      const int64_t i = (rank + k / GROUP * blocks) * GROUP + k % GROUP;
      if (i < rows) body(i);
    }
  }
  template <typename Body>
  __device__ void for_columns(const Body& body) {
#pragma unroll 1
    for (int64_t j = threadIdx.x; j < columns; j += TEAM_THREADS) body(j);
  }
  // Each column is one thread's of the whole team.
  template <typename Body>
  __device__ void for_shared_columns(const Body& body) {
#pragma unroll 1
    for (int64_t j = rank * TEAM_THREADS + threadIdx.x; j < columns; j += blocks * TEAM_THREADS) body(j);
  }

  // Calls body(i, j, index) for this thread's entries. Bodies store, and a load cannot be moved before that: nothing would
  // be gained from unrolled loops.
  template <typename Body>
  __device__ void for_entries(const Body& body) {
    for (int64_t group = rank; group < groups; group += blocks) {
      const int64_t last = (group + 1) * GROUP < rows ? (group + 1) * GROUP : rows;
      for (int64_t j = threadIdx.x; j < columns; j += TEAM_THREADS) {
#pragma unroll 1
        for (int64_t i = group * GROUP; i < last; ++i) body(i, j, i * columns + j);
      }
    }
  }

  // entry(i, j, index) -> a Pair. Reduces the first over each row, into for_rows, and the second over each column of this
  // block's rows, into `partial`.
  template <typename Operation, typename Entry>
  __device__ void reduce_entries(double neutral, Operation operation, double* for_rows, const Entry& entry) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int64_t group = rank; group < groups; group += blocks) {
      double of_rows[GROUP];
#pragma unroll
      for (int r = 0; r < GROUP; ++r) of_rows[r] = neutral;
#pragma unroll 1
      for (int64_t j = threadIdx.x; j < columns; j += TEAM_THREADS) {
        double of_column = group == rank ? neutral : partial[j];
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
          const int64_t i = group * GROUP + r;
          if (i >= rows) continue;
          const Pair pair = entry(i, j, i * columns + j);
          of_rows[r] = operation(of_rows[r], pair.of_row);
          of_column = operation(of_column, pair.of_column);
        }
        partial[j] = of_column;
      }
      __syncwarp();  // lanes beyond the columns have come
      const double value = reduce_rows(of_rows, operation);
      __syncthreads();  // the group before has been read
      if (lane % 4 == 0) of_groups[warp * GROUP + lane / 4] = value;
      __syncthreads();
      const int64_t i = group * GROUP + threadIdx.x;
      if (threadIdx.x < GROUP && i < rows) {
        double all = of_groups[threadIdx.x];
#pragma unroll 1
        for (int w = 1; w < TEAM_WARPS; ++w) all = operation(all, of_groups[w * GROUP + threadIdx.x]);
        for_rows[i] = all;
      }
    }
    __syncthreads();
  }

  // Column j of `partial` over all blocks, which have waited for each other.
  template <typename Operation>
  __device__ double over_blocks(int64_t j, Operation operation) {
    const double* first = partial - rank * columns;
    double value = __ldcg(first + j);
    for (int64_t block = 1; block < blocks; ++block) value = operation(value, __ldcg(first + block * columns + j));
    return value;
  }

  // Every thread gets the team's sums.
  template <int COUNT>
  __device__ void sum(double (&values)[COUNT]) {
    sum_over_block(values, of_warps);
    double* const all = sums + turn * blocks * MOST_SUMS;
    turn ^= 1;  // those of the last time may still be read
    if (threadIdx.x == 0) {
      for (int k = 0; k < COUNT; ++k) all[rank * MOST_SUMS + k] = values[k];
    }
    wait();
    for (int k = 0; k < COUNT; ++k) {
      values[k] = 0;
      for (int64_t block = 0; block < blocks; ++block) values[k] += __ldcg(all + block * MOST_SUMS + k);
    }
  }

  // Of one kernel for both precisions: there is little that the compiler could gain from knowing which.
  __device__ double cost(int64_t index) const { return read_wide(t.cost, first + index); }
  __device__ double gradient(int64_t i, int64_t j, int64_t index) const {
    const double here = cost(index);
    return here < infinite() ? here - u[i] - v[j] : 0;  // a forbidden entry stays 0
  }

  // As in solve_in_block.
  __device__ void largest_feasible(const double* at_u, const double* at_v, double* for_rows, double* for_columns) {
    reduce_entries(infinite(), Least(), for_rows, [&](int64_t i, int64_t j, int64_t index) -> Pair {
      const double here = cost(index);
      return {here - at_v[j], here - at_u[i]};
    });
    this->for_rows([&](int64_t i) { for_rows[i] = least(t.tau_a * a[i], for_rows[i]); });
    wait();
    for_shared_columns([&](int64_t j) { reduced[j] = least(t.tau_b * b[j], over_blocks(j, Least())); });
    wait();
    this->for_columns([&](int64_t j) { for_columns[j] = __ldcg(reduced + j); });
    __syncthreads();
  }

  // This thread's part: the rows of its block; the columns are counted by the first block alone.
  __device__ double dual_part(const double* at_u, const double* at_v) {
    double part = 0;
    for_rows([&](int64_t i) { part += a[i] * at_u[i] - square(at_u[i]) / (2 * t.tau_a); });
    if (rank == 0) for_columns([&](int64_t j) { part += b[j] * at_v[j] - square(at_v[j]) / (2 * t.tau_b); });
    return part;
  }
  __device__ double penalties_part() {
    double part = 0;
    for_rows([&](int64_t i) { part += t.tau_a / 2 * square(plan_rows[i] - a[i]); });
    if (rank == 0) for_columns([&](int64_t j) { part += t.tau_b / 2 * square(plan_columns[j] - b[j]); });
    return part;
  }

  // Sums the trial's columns and gives tau_a |move 1|^2 + tau_b |move' 1|^2 of the move from the point, with other sums.
  __device__ void sum_trial(double (&moved)[3]) {
    for_rows([&](int64_t i) { moved[2] += t.tau_a * square(trial_rows[i] - point_rows[i]); });
    wait();
    for_shared_columns([&](int64_t j) {
      const double value = over_blocks(j, Sum());
      reduced[j] = value;
      moved[2] += t.tau_b * square(value - point_columns[j]);
    });
    sum(moved);
    for_columns([&](int64_t j) { trial_columns[j] = __ldcg(reduced + j); });
  }

  // The trial becomes the plan, and the point lies `weight` beyond it.
  __device__ void move_sums(double weight) {
    __syncthreads();  // u and v have been read
    for_rows([&](int64_t i) {
      point_rows[i] = trial_rows[i] + weight * (trial_rows[i] - plan_rows[i]);
      plan_rows[i] = trial_rows[i];
      u[i] = t.tau_a * (a[i] - point_rows[i]);
    });
    for_columns([&](int64_t j) {
      point_columns[j] = trial_columns[j] + weight * (trial_columns[j] - plan_columns[j]);
      plan_columns[j] = trial_columns[j];
      v[j] = t.tau_b * (b[j] - point_columns[j]);
    });
    __syncthreads();
  }

  __device__ void accelerated_step(Search& search) {
    const double length = 1 / search.curvature;
    double moved[3] = {};
    reduce_entries(0, Sum(), trial_rows, [&](int64_t i, int64_t j, int64_t index) -> Pair {
      const double at = point[index], next = positive_part(at - length * gradient(i, j, index)), move = next - at;
      moved[0] += square(move);
      moved[1] += move * (next - plan[index]);
      return {next, next};
    });
    sum_trial(moved);
    if (!search.accept(t.tau_a + t.tau_b, moved[2], moved[0], moved[1])) return;
    for_entries([&](int64_t i, int64_t j, int64_t index) {
      const double next = positive_part(point[index] - length * gradient(i, j, index));
      point[index] = next + search.weight * (next - plan[index]);
      plan[index] = next;
    });
    move_sums(search.weight);
  }

  // FedU2's Eq. 6 with the reference's guards. The point is the plan.
  __device__ void steepest_step(double& shorten) {
    double along[2] = {};
    reduce_entries(0, Sum(), trial_rows, [&](int64_t i, int64_t j, int64_t index) -> Pair {
      const double value = gradient(i, j, index);
      along[0] += square(value);
      return {value, value};
    });
    for_rows([&](int64_t i) { along[1] += t.tau_a * square(trial_rows[i]); });
    wait();
    for_shared_columns([&](int64_t j) { along[1] += t.tau_b * square(over_blocks(j, Sum())); });
    sum(along);
    const double limit = t.tau_a * columns + t.tau_b * rows;  // the largest eigenvalue
    const double length = shorten * (along[1] > 1e-6 * limit * along[0] ? along[0] / along[1] : 1 / limit);

    double moved[3] = {};  // the first: <gradient, move>
    reduce_entries(0, Sum(), trial_rows, [&](int64_t i, int64_t j, int64_t index) -> Pair {
      const double slope = gradient(i, j, index), next = positive_part(plan[index] - length * slope);
      moved[0] += slope * (next - plan[index]);
      return {next, next};
    });
    sum_trial(moved);
    const bool good = moved[0] + moved[2] / 2 <= 1e-4 * moved[0];
    shorten = good ? 1 : shorten / 2;
    if (!good) return;
    for_entries([&](int64_t i, int64_t j, int64_t index) {
      plan[index] = positive_part(plan[index] - length * gradient(i, j, index));
    });
    move_sums(0);
  }

  __device__ void solve() {
    double told[2] = {};  // entries that are no numbers, entries that pay
    for_rows([&](int64_t i) {
      a[i] = read_one(t.a, problem * rows + i);
      told[0] += !(fabs(a[i]) < infinite());
      plan_rows[i] = point_rows[i] = best_rows[i] = 0;
      u[i] = t.tau_a * a[i];
    });
    for_columns([&](int64_t j) {
      b[j] = read_one(t.b, problem * columns + j);
      told[0] += !(fabs(b[j]) < infinite());
      plan_columns[j] = point_columns[j] = best_columns[j] = 0;
      v[j] = t.tau_b * b[j];
    });
    __syncthreads();
    for_entries([&](int64_t i, int64_t j, int64_t index) {
      const double here = cost(index);
      told[0] += !(here > -infinite());
      told[1] += u[i] + v[j] - here > 0;
      plan[index] = point[index] = 0;
    });
    sum(told);
    const bool bad = told[0] > 0;
    const double nan = not_a_number();
    for_entries([&](int64_t, int64_t, int64_t index) { write_wide(t.plan, first + index, bad ? nan : 0); });
    double start[1] = {penalties_part()};
    sum(start);
    Certificate found = {start[0], start[0], -infinite(), bad ? nan : told[1] > 0 ? infinite() : 0};
    Search search = {t.tau_a + t.tau_b, 1, 0};
    double shorten = 1;
    int64_t done = 0;

    for (int64_t iteration = 1; iteration <= t.max_iterations && found.gap > t.tol; ++iteration) {
      if (t.accelerated) {
        accelerated_step(search);
      } else {
        steepest_step(shorten);
      }
      if (iteration % CHECK_EVERY && iteration != t.max_iterations) continue;

      double value[3] = {0, 0, penalties_part()};
      for_entries([&](int64_t, int64_t, int64_t index) {
        const double here = plan[index] > 0 ? cost(index) * plan[index] : 0;
        value[0] += here;
        value[1] += fabs(here);
      });
      sum(value);
      if (found.improves(value[0], value[1], value[2])) {
        for_entries([&](int64_t, int64_t, int64_t index) { write_wide(t.plan, first + index, plan[index]); });
        for_rows([&](int64_t i) { best_rows[i] = plan_rows[i]; });
        for_columns([&](int64_t j) { best_columns[j] = plan_columns[j]; });
      }
      // trial_* are free until the next step.
      for_rows([&](int64_t i) { trial_rows[i] = t.tau_a * (a[i] - plan_rows[i]); });
      for_columns([&](int64_t j) { trial_columns[j] = t.tau_b * (b[j] - plan_columns[j]); });
      __syncthreads();
      double *from_rows = trial_rows, *to_rows = room_rows, *from_columns = trial_columns, *to_columns = room_columns;
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
        largest_feasible(from_rows, from_columns, to_rows, to_columns);
        from_rows = room_rows, to_rows = room_rows2, from_columns = room_columns, to_columns = room_columns2;
      }
      double bounds[2] = {dual_part(room_rows, room_columns2), dual_part(room_rows2, room_columns)};
      sum(bounds);
      found.raise(bounds[0] > bounds[1] ? bounds[0] : bounds[1]);
      done = iteration;
    }

    __syncthreads();
    double mass[1] = {};
    for_rows([&](int64_t i) {
      t.u[problem * rows + i] = bad ? nan : t.tau_a * (a[i] - best_rows[i]);
      mass[0] += best_rows[i];
    });
    sum(mass);
    if (rank != 0) return;
    for_columns([&](int64_t j) { t.v[problem * columns + j] = bad ? nan : t.tau_b * (b[j] - best_columns[j]); });
    if (threadIdx.x == 0) {
      t.value[problem] = bad ? nan : found.value;
      t.mass[problem] = bad ? nan : mass[0];
      t.gap[problem] = found.gap;
      t.iterations[problem] = done;
    }
  }
};

__global__ void __launch_bounds__(TEAM_THREADS, 1)
    solve_in_team(const Transport t, const TeamSize size, double* memory, unsigned* counters) {
  SHARED(of_warps, double[MOST_SUMS * 32]);
  SHARED(of_groups, double[TEAM_WARPS * GROUP]);
  const int64_t team = blockIdx.x / size.blocks;
  for (int64_t problem = team; problem < t.problems; problem += size.teams) {
    Team solver(t, size, problem, memory + team * size.words(t), counters + team, of_warps, of_groups);
    solver.solve();
    solver.wait();  // its memory is the next problem's
  }
}

// ---- on the host ----

bool one_block(const Transport& t) { return t.accelerated && t.rows <= BLOCK_LIMIT && t.columns <= BLOCK_LIMIT; }

BlockMemory memory_of(const Transport& t) { return {static_cast<int>((t.rows + GROUP - 1) / GROUP)}; }

// Where a block keeps its entries: the point, then the rest of the plan, in shared memory as long as there is room.
struct Room {
  bool point, rest;
  size_t shared;  // bytes
};

Room room_of(const BlockMemory& memory) {
  Room room = {false, false, sizeof(double) * (BlockMemory::FIXED + memory.partial())};
  const size_t point = sizeof(double) * memory.point(), rest = sizeof(double) * memory.rest();
  room.point = room.shared + point <= shared_limit();
  room.shared += room.point ? point : 0;
  room.rest = room.shared + rest <= shared_limit();
  room.shared += room.rest ? rest : 0;
  return room;
}

const char* launch_blocks(const Transport& t, double* words, Stream stream) {
  const BlockMemory memory = memory_of(t);
  const Room room = room_of(memory);
  const Shape shape = {static_cast<unsigned>(t.problems), 32u * memory.warps, room.shared};
  double* const points = room.point ? nullptr : words;
  double* const rests = room.rest ? nullptr : words + (room.point ? 0 : t.problems * memory.point());
  if (t.cost.dtype == DType::f64) return launch(shape, stream, solve_in_block<double>, t, points, rests);
  return launch(shape, stream, solve_in_block<float>, t, points, rests);
}

TeamSize team_size(const Transport& t) {
  const int64_t groups = (t.rows + GROUP - 1) / GROUP, most = groups < MOST_BLOCKS ? groups : MOST_BLOCKS;
  const int64_t room = static_cast<int64_t>(multiprocessors()) * blocks_at_a_time({1, TEAM_THREADS}, solve_in_team);
  const int64_t blocks = most < room ? most : room > 0 ? room : 1;
  const int64_t teams = room / blocks < t.problems ? room / blocks : t.problems;
  return {blocks, teams > 0 ? teams : 1};
}

const char* launch_teams(const Transport& t, double* words, Stream stream) {
  const TeamSize size = team_size(t);
  unsigned* const counters = reinterpret_cast<unsigned*>(words);
  if (const char* error = fill_zero(words, sizeof(double) * size.teams, stream)) return error;
  const Shape shape = {static_cast<unsigned>(size.blocks * size.teams), TEAM_THREADS, 0, true};
  return launch(shape, stream, solve_in_team, t, size, words + size.teams, counters);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_unbalanced_ot_words(const fedkernels::cuda::Transport* transport) {
  using namespace fedkernels::cuda;
  const Transport& t = *transport;
  if (t.problems == 0) return 0;
  if (one_block(t)) {
    const BlockMemory memory = memory_of(t);
    const Room room = room_of(memory);
    return t.problems * ((room.point ? 0 : memory.point()) + (room.rest ? 0 : memory.rest()));
  }
  const TeamSize size = team_size(t);
  return size.teams * (1 + size.words(t));
}

extern "C" const char* cuda_unbalanced_ot(const fedkernels::cuda::Transport* transport, double* words,
                                          fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  const Transport& t = *transport;
  if (t.problems == 0) return nullptr;
  if (t.cost.dtype != fedkernels::DType::f64 && t.cost.dtype != fedkernels::DType::f32) {
    return "cost must be float32 or float64";
  }
  return one_block(t) ? launch_blocks(t, words, stream) : launch_teams(t, words, stream);
}

// Unbalanced optimal transport to 128 x 128: a problem is one block's. A warp holds eight rows, half of the plan in
// registers, which is what they have room for, the rest and the point with momentum in shared memory.
#include "cuda/unbalanced_ot_solver.h"

namespace fedkernels::cuda {

namespace {

constexpr int BLOCK_LIMIT = TRANSPORT_BLOCK_LIMIT, BLOCK_THREADS = BLOCK_LIMIT / GROUP * 32;
constexpr int COLUMNS = BLOCK_LIMIT / 32;      // of a lane
constexpr int IN_REGISTERS = COLUMNS / 2;      // columns of a lane of which the plan is kept in registers

// The vectors of a problem over its rows and over its columns.
enum Vector { MASSES, DUALS, OF_PLAN, OF_POINT, OF_TRIAL, OF_BEST, ROOM, VECTORS };

// Doubles of shared memory: the warps' scalars, the vectors and the warps' part of each column; then, where there is
// room, the point and what the registers do not hold of the plan.
struct BlockMemory {
  int warps;

  static constexpr int OF_WARPS = 2 * 32, STATE = 8, FIXED = OF_WARPS + STATE + 2 * VECTORS * BLOCK_LIMIT;
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
    return dynamic_shared<double>() + BlockMemory::OF_WARPS + BlockMemory::STATE + vector * BLOCK_LIMIT;
  }
  static __device__ __forceinline__ double* by_column(int vector) { return by_row(VECTORS + vector); }
  static __device__ __forceinline__ Certificate& certificate() {
    return *reinterpret_cast<Certificate*>(dynamic_shared<double>() + BlockMemory::OF_WARPS);
  }
  static __device__ __forceinline__ Search& search() {
    return *reinterpret_cast<Search*>(dynamic_shared<double>() + BlockMemory::OF_WARPS + 5);
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

  // entry(r, c) -> a Pair. Reduces the first over each row, into by_row(to), and the second over the warp's part of
  // each column, into partial(), for after a barrier. Half of the rows at a time, for the sake of registers.
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
      if (matrix.inside(r, c)) write_one(t.plan, first + r * columns + c * 32, plan_at(r, c));
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
    Certificate now = certificate();
    if (now.improves(linear[0], linear[1], penalties[0])) {
      write_plan();
      for_rows([&](int i) { by_row(OF_BEST)[i] = by_row(OF_PLAN)[i]; });
      for_columns([&](int j) { by_column(OF_BEST)[j] = by_column(OF_PLAN)[j]; });
    }
    // The dual value of the plan's u and v, made feasible by shrinking either first. OF_TRIAL is free until the next
    // step.
    for_rows([&](int i) { by_row(OF_TRIAL)[i] = t.tau_a * (by_row(MASSES)[i] - by_row(OF_PLAN)[i]); });
    for_columns([&](int j) { by_column(OF_TRIAL)[j] = t.tau_b * (by_column(MASSES)[j] - by_column(OF_PLAN)[j]); });
    __syncthreads();
    if (threadIdx.x == 0) certificate() = now;
#pragma unroll 1
    for (int round = 0; round < 2; ++round) largest_feasible(round ? ROOM : OF_TRIAL, round ? OF_TRIAL : ROOM);
    double bounds[2] = {dual_part(ROOM, OF_TRIAL), dual_part(OF_TRIAL, ROOM)};
    sum_over_block(bounds, of_warps());
    now = certificate();
    now.raise(bounds[0] > bounds[1] ? bounds[0] : bounds[1]);
    __syncthreads();
    if (threadIdx.x == 0) certificate() = now;
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
      write_one(t.plan, problem * rows * columns + index, bad ? nan : 0);
    }
    double start[1] = {penalties_part()};
    sum_over_block(start, of_warps());
    if (threadIdx.x == 0) {
      certificate() = {start[0], start[0], -infinite(), bad ? nan : pays ? infinite() : 0, ROUNDING * start[0]};
      search() = {t.tau_a + t.tau_b, 1, 0};
    }
    __syncthreads();
    int iteration = 0;
    while (iteration < t.max_iterations && certificate().gap > t.tol) {
      step();
      ++iteration;
      if (iteration % CHECK_EVERY == 0 || iteration == t.max_iterations) check();
    }

    __syncthreads();
    // The same as `bad`, without a register for it during the iterations.
    const bool hopeless = certificate().gap != certificate().gap;
    double mass[1] = {};
    for_rows([&](int i) {
      if (i < rows) {
        t.u[problem * rows + i] =
            hopeless ? not_a_number() : t.tau_a * (by_row(MASSES)[i] - by_row(OF_BEST)[i]);
      }
      mass[0] += by_row(OF_BEST)[i];
    });
    for_columns([&](int j) {
      if (j < columns) {
        t.v[problem * columns + j] =
            hopeless ? not_a_number() : t.tau_b * (by_column(MASSES)[j] - by_column(OF_BEST)[j]);
      }
    });
    sum_over_block(mass, of_warps());
    if (threadIdx.x == 0) {
      t.value[problem] = hopeless ? not_a_number() : certificate().value;
      t.mass[problem] = hopeless ? not_a_number() : mass[0];
      t.gap[problem] = certificate().gap;
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

// ---- on the host ----

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

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_unbalanced_ot_block_words(const fedkernels::cuda::Transport* transport) {
  using namespace fedkernels::cuda;
  const BlockMemory memory = memory_of(*transport);
  const Room room = room_of(memory);
  return transport->problems * ((room.point ? 0 : memory.point()) + (room.rest ? 0 : memory.rest()));
}

extern "C" const char* cuda_unbalanced_ot_block(const fedkernels::cuda::Transport* transport, double* words,
                                                fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  const Transport& t = *transport;
  if (!fits_one_block(t)) return "the problem does not fit one block";
  return t.problems == 0 ? nullptr : launch_blocks(t, words, stream);
}

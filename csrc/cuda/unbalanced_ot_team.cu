// Unbalanced optimal transport of any size, and FedU2's steepest descent: a problem is a team's. The blocks of a team
// run at the same time and wait for each other; the entries lie in global memory, where the second-level cache holds
// them.
#include "cuda/unbalanced_ot_solver.h"

namespace fedkernels::cuda {

namespace {

constexpr int TEAM_THREADS = 192, TEAM_WARPS = TEAM_THREADS / 32;
constexpr int TEAM_BLOCKS = 2;  // of a multiprocessor: 12 warps, with up to 168 registers a thread
constexpr int LOADS = 4;  // entries that a thread loads at a time
constexpr int64_t MOST_BLOCKS = 64;
constexpr int MOST_SUMS = 3;

struct TeamSize {
  int64_t blocks, teams;

  // Doubles of memory for each team.
  __host__ __device__ int64_t words(const Transport& t) const {
    return 2 * t.rows * t.columns + 8 * t.rows + (9 * t.columns + 2 * MOST_SUMS) * blocks + t.columns;
  }
};

// Where in the team's memory a block finds what it works on. Pointers in registers would leave too few for the entries.
struct Places {
  int64_t plan, point;
  int64_t a, u, plan_rows, point_rows, trial_rows, best_rows, room_rows, room_rows2;
  int64_t b, v, plan_columns, point_columns, trial_columns, best_columns, room_columns, room_columns2, partial;
  int64_t reduced, sums;  // for all blocks: [columns], [2, blocks, MOST_SUMS]
};

struct Entry {
  double cost, plan, point, u, v;
};

// The groups of eight rows are shared out to the blocks, a group's columns to the threads: a thread works on the same
// entries all the time. Of vectors over the rows a block uses its own rows only; of those over the columns each has a
// copy, and the copies are equal. What is for all blocks is written between two barriers and read by __ldcg.
struct Team {
  const Transport& t;
  const int64_t rows, columns, problem, blocks, rank, groups, first;  // first: entry of all problems' matrices
  unsigned long long* counter;
  double* of_warps;   // shared memory, [MOST_SUMS, 32]
  double* of_groups;  // shared memory, [TEAM_WARPS, GROUP]
  Places& at;         // shared memory
  double* memory;     // of the team
  int turn = 0;

  __device__ Team(const Transport& t, const TeamSize& size, int64_t problem, double* memory, unsigned long long* counter,
                  double* of_warps, double* of_groups, Places& places)
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
        of_groups(of_groups),
        at(places),
        memory(memory) {
    if (threadIdx.x == 0) share_out();
    __syncthreads();
  }

  __device__ void share_out() {
    int64_t taken = 0;
    const auto take = [&](int64_t count) {
      taken += count;
      return taken - count;
    };
    const auto copy = [&] { return take(columns * blocks) + rank * columns; };
    at.plan = take(rows * columns);
    at.point = take(rows * columns);
    at.a = take(rows), at.u = take(rows), at.plan_rows = take(rows), at.point_rows = take(rows);
    at.trial_rows = take(rows), at.best_rows = take(rows), at.room_rows = take(rows), at.room_rows2 = take(rows);
    at.b = copy(), at.v = copy(), at.plan_columns = copy(), at.point_columns = copy(), at.trial_columns = copy();
    at.best_columns = copy(), at.room_columns = copy(), at.room_columns2 = copy(), at.partial = copy();
    at.reduced = take(columns);
    at.sums = take(2 * MOST_SUMS * blocks);
  }

  __device__ double* of(int64_t place) const { return memory + place; }

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

  // Column j of the rows from `row` on, at `at_u` and `at_v`. All loads are on their way before the first is used, and no
  // branch is between them: past the last row there is that row once more. What a pass does not use is not loaded.
  __device__ __forceinline__ void load(Entry (&entries)[LOADS], int64_t row, int64_t j, const double* at_u,
                                       const double* at_v) const {
    int64_t i[LOADS], index[LOADS];
#pragma unroll
    for (int r = 0; r < LOADS; ++r) {
      i[r] = row + r < rows ? row + r : rows - 1;
      index[r] = i[r] * columns + j;
    }
    if (t.cost.dtype == DType::f64) {
#pragma unroll
      for (int r = 0; r < LOADS; ++r) entries[r].cost = __ldg(static_cast<const double*>(t.cost.data) + first + index[r]);
    } else {
#pragma unroll
      for (int r = 0; r < LOADS; ++r) entries[r].cost = __ldg(static_cast<const float*>(t.cost.data) + first + index[r]);
    }
    const double of_column = at_v[j];
#pragma unroll
    for (int r = 0; r < LOADS; ++r) {
      entries[r].plan = of(at.plan)[index[r]];
      entries[r].point = of(at.point)[index[r]];
      entries[r].u = at_u[i[r]];
      entries[r].v = of_column;
    }
  }

  // Calls body(index, entry) for this thread's entries; it may store to them.
  template <typename Body>
  __device__ void for_entries(const Body& body) {
    for (int64_t group = rank; group < groups; group += blocks) {
#pragma unroll 1
      for (int64_t j = threadIdx.x; j < columns; j += TEAM_THREADS) {
#pragma unroll 1
        for (int64_t row = group * GROUP; row < (group + 1) * GROUP && row < rows; row += LOADS) {
          Entry entries[LOADS];
          load(entries, row, j, of(at.u), of(at.v));
#pragma unroll
          for (int r = 0; r < LOADS; ++r) {
            if (row + r < rows) body((row + r) * columns + j, entries[r]);
          }
        }
      }
    }
  }

  // of_entry(entry) -> a Pair. Reduces the first over each row, into for_rows, and the second over each column of this
  // block's rows, into `partial`.
  template <typename Operation, typename OfEntry>
  __device__ void reduce_entries(double neutral, Operation operation, const double* at_u, const double* at_v,
                                 double* for_rows, const OfEntry& of_entry) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int64_t group = rank; group < groups; group += blocks) {
      double of_rows[GROUP];
#pragma unroll
      for (int r = 0; r < GROUP; ++r) of_rows[r] = neutral;
#pragma unroll 1
      for (int64_t j = threadIdx.x; j < columns; j += TEAM_THREADS) {
        double of_column = group == rank ? neutral : of(at.partial)[j];
        Entry entries[LOADS];
#pragma unroll
        for (int r = 0; r < GROUP; ++r) {
          const int64_t row = group * GROUP + r;
          if (r % LOADS == 0) load(entries, row, j, at_u, at_v);
          if (row >= rows) continue;
          const Pair pair = of_entry(entries[r % LOADS]);
          of_rows[r] = operation(of_rows[r], pair.of_row);
          of_column = operation(of_column, pair.of_column);
        }
        of(at.partial)[j] = of_column;
      }
      __syncwarp();  // also lanes that had no columns
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
    const double* first = of(at.partial) - rank * columns;
    double value = __ldcg(first + j);
#pragma unroll 4
    for (int64_t block = 1; block < blocks; ++block) value = operation(value, __ldcg(first + block * columns + j));
    return value;
  }

  // Every thread gets the team's sums: each warp adds up what the blocks have written, a block a lane.
  template <int COUNT>
  __device__ void sum(double (&values)[COUNT]) {
    sum_over_block(values, of_warps);
    double* const all = of(at.sums) + turn * blocks * MOST_SUMS;
    turn ^= 1;  // those of the last time may still be read
    if (threadIdx.x == 0) {
      for (int k = 0; k < COUNT; ++k) all[rank * MOST_SUMS + k] = values[k];
    }
    wait();
    for (int k = 0; k < COUNT; ++k) {
      double of_lane = 0;
#pragma unroll 1
      for (int64_t block = threadIdx.x % 32; block < blocks; block += 32) of_lane += __ldcg(all + block * MOST_SUMS + k);
      values[k] = warp_reduce(of_lane, Sum());
    }
  }

  __device__ static double gradient(const Entry& e) {
    return e.cost < infinite() ? e.cost - e.u - e.v : 0;  // a forbidden entry stays 0
  }

  // As in unbalanced_ot_block.cu.
  __device__ void largest_feasible(const double* at_u, const double* at_v, double* for_rows, double* for_columns) {
    reduce_entries(infinite(), Least(), at_u, at_v, for_rows, [&](const Entry& e) -> Pair {
      return {e.cost - e.v, e.cost - e.u};
    });
    this->for_rows([&](int64_t i) { for_rows[i] = least(t.tau_a * of(at.a)[i], for_rows[i]); });
    wait();
    for_shared_columns([&](int64_t j) { of(at.reduced)[j] = least(t.tau_b * of(at.b)[j], over_blocks(j, Least())); });
    wait();
    this->for_columns([&](int64_t j) { for_columns[j] = __ldcg(of(at.reduced) + j); });
    __syncthreads();
  }

  // This thread's part: the rows of its block; the columns are counted by the first block alone.
  __device__ double dual_part(const double* at_u, const double* at_v) {
    double part = 0;
    for_rows([&](int64_t i) { part += of(at.a)[i] * at_u[i] - square(at_u[i]) / (2 * t.tau_a); });
    if (rank == 0) for_columns([&](int64_t j) { part += of(at.b)[j] * at_v[j] - square(at_v[j]) / (2 * t.tau_b); });
    return part;
  }
  __device__ double penalties_part() {
    double part = 0;
    for_rows([&](int64_t i) { part += t.tau_a / 2 * square(of(at.plan_rows)[i] - of(at.a)[i]); });
    if (rank == 0) for_columns([&](int64_t j) { part += t.tau_b / 2 * square(of(at.plan_columns)[j] - of(at.b)[j]); });
    return part;
  }

  // Sums the trial's columns and gives tau_a |move 1|^2 + tau_b |move' 1|^2 of the move from the point, with other
  // sums.
  __device__ void sum_trial(double (&moved)[3]) {
    for_rows([&](int64_t i) { moved[2] += t.tau_a * square(of(at.trial_rows)[i] - of(at.point_rows)[i]); });
    wait();
    for_shared_columns([&](int64_t j) {
      const double value = over_blocks(j, Sum());
      of(at.reduced)[j] = value;
      moved[2] += t.tau_b * square(value - of(at.point_columns)[j]);
    });
    sum(moved);
    for_columns([&](int64_t j) { of(at.trial_columns)[j] = __ldcg(of(at.reduced) + j); });
  }

  // The trial becomes the plan, and the point lies `weight` beyond it.
  __device__ void move_sums(double weight) {
    __syncthreads();  // u and v have been read
    for_rows([&](int64_t i) {
      of(at.point_rows)[i] = of(at.trial_rows)[i] + weight * (of(at.trial_rows)[i] - of(at.plan_rows)[i]);
      of(at.plan_rows)[i] = of(at.trial_rows)[i];
      of(at.u)[i] = t.tau_a * (of(at.a)[i] - of(at.point_rows)[i]);
    });
    for_columns([&](int64_t j) {
      of(at.point_columns)[j] = of(at.trial_columns)[j] + weight * (of(at.trial_columns)[j] - of(at.plan_columns)[j]);
      of(at.plan_columns)[j] = of(at.trial_columns)[j];
      of(at.v)[j] = t.tau_b * (of(at.b)[j] - of(at.point_columns)[j]);
    });
    __syncthreads();
  }

  __device__ void accelerated_step(Search& search) {
    const double length = 1 / search.curvature;
    double moved[3] = {};
    reduce_entries(0, Sum(), of(at.u), of(at.v), of(at.trial_rows), [&](const Entry& e) -> Pair {
      const double next = positive_part(e.point - length * gradient(e)), move = next - e.point;
      moved[0] += square(move);
      moved[1] += move * (next - e.plan);
      return {next, next};
    });
    sum_trial(moved);
    if (!search.accept(t.tau_a + t.tau_b, moved[2], moved[0], moved[1])) return;
    for_entries([&](int64_t index, const Entry& e) {
      const double next = positive_part(e.point - length * gradient(e));
      of(at.point)[index] = next + search.weight * (next - e.plan);
      of(at.plan)[index] = next;
    });
    move_sums(search.weight);
  }

  // FedU2's Eq. 6 with the reference's guards. The point is the plan.
  __device__ void steepest_step(double& shorten) {
    double along[2] = {};
    reduce_entries(0, Sum(), of(at.u), of(at.v), of(at.trial_rows), [&](const Entry& e) -> Pair {
      const double value = gradient(e);
      along[0] += square(value);
      return {value, value};
    });
    for_rows([&](int64_t i) { along[1] += t.tau_a * square(of(at.trial_rows)[i]); });
    wait();
    for_shared_columns([&](int64_t j) { along[1] += t.tau_b * square(over_blocks(j, Sum())); });
    sum(along);
    const double limit = t.tau_a * columns + t.tau_b * rows;  // the largest eigenvalue
    const double length = shorten * (along[1] > 1e-6 * limit * along[0] ? along[0] / along[1] : 1 / limit);

    double moved[3] = {};  // the first: <gradient, move>
    reduce_entries(0, Sum(), of(at.u), of(at.v), of(at.trial_rows), [&](const Entry& e) -> Pair {
      const double slope = gradient(e), next = positive_part(e.plan - length * slope);
      moved[0] += slope * (next - e.plan);
      return {next, next};
    });
    sum_trial(moved);
    const bool good = moved[0] + moved[2] / 2 <= 1e-4 * moved[0];
    shorten = good ? 1 : shorten / 2;
    if (!good) return;
    for_entries([&](int64_t index, const Entry& e) { of(at.plan)[index] = positive_part(e.plan - length * gradient(e)); });
    move_sums(0);
  }

  __device__ void solve() {
    double counts[2] = {};  // entries that are not finite numbers, entries worth their cost
    for_rows([&](int64_t i) {
      of(at.a)[i] = read_one(t.a, problem * rows + i);
      counts[0] += !(fabs(of(at.a)[i]) < infinite());
      of(at.plan_rows)[i] = of(at.point_rows)[i] = of(at.best_rows)[i] = 0;
      of(at.u)[i] = t.tau_a * of(at.a)[i];
    });
    for_columns([&](int64_t j) {
      of(at.b)[j] = read_one(t.b, problem * columns + j);
      counts[0] += !(fabs(of(at.b)[j]) < infinite());
      of(at.plan_columns)[j] = of(at.point_columns)[j] = of(at.best_columns)[j] = 0;
      of(at.v)[j] = t.tau_b * of(at.b)[j];
    });
    __syncthreads();
    for_entries([&](int64_t index, const Entry& e) {
      counts[0] += !(e.cost > -infinite());
      counts[1] += e.u + e.v - e.cost > 0;
      of(at.plan)[index] = of(at.point)[index] = 0;
    });
    sum(counts);
    const bool bad = counts[0] > 0;
    const double nan = not_a_number();
    for_entries([&](int64_t index, const Entry&) { write_one(t.plan, first + index, bad ? nan : 0); });
    double start[1] = {penalties_part()};
    sum(start);
    Certificate certificate = {start[0], start[0], -infinite(), bad ? nan : counts[1] > 0 ? infinite() : 0,
                               ROUNDING * start[0]};
    Search search = {t.tau_a + t.tau_b, 1, 0};
    double shorten = 1;
    int64_t done = 0;

    for (int64_t iteration = 1; iteration <= t.max_iterations && certificate.gap > t.tol; ++iteration) {
      if (t.accelerated) {
        accelerated_step(search);
      } else {
        steepest_step(shorten);
      }
      if (iteration % CHECK_EVERY && iteration != t.max_iterations) continue;

      double value[3] = {0, 0, penalties_part()};
      for_entries([&](int64_t, const Entry& e) {
        const double here = e.plan > 0 ? e.cost * e.plan : 0;
        value[0] += here;
        value[1] += fabs(here);
      });
      sum(value);
      if (certificate.improves(value[0], value[1], value[2])) {
        for_entries([&](int64_t index, const Entry& e) { write_one(t.plan, first + index, e.plan); });
        for_rows([&](int64_t i) { of(at.best_rows)[i] = of(at.plan_rows)[i]; });
        for_columns([&](int64_t j) { of(at.best_columns)[j] = of(at.plan_columns)[j]; });
      }
      // trial_* are free until the next step.
      for_rows([&](int64_t i) { of(at.trial_rows)[i] = t.tau_a * (of(at.a)[i] - of(at.plan_rows)[i]); });
      for_columns([&](int64_t j) { of(at.trial_columns)[j] = t.tau_b * (of(at.b)[j] - of(at.plan_columns)[j]); });
      __syncthreads();
      double *from_rows = of(at.trial_rows), *to_rows = of(at.room_rows), *from_columns = of(at.trial_columns), *to_columns = of(at.room_columns);
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
        largest_feasible(from_rows, from_columns, to_rows, to_columns);
        from_rows = of(at.room_rows), to_rows = of(at.room_rows2), from_columns = of(at.room_columns), to_columns = of(at.room_columns2);
      }
      double bounds[2] = {dual_part(of(at.room_rows), of(at.room_columns2)), dual_part(of(at.room_rows2), of(at.room_columns))};
      sum(bounds);
      certificate.raise(bounds[0] > bounds[1] ? bounds[0] : bounds[1]);
      done = iteration;
    }

    __syncthreads();
    double mass[1] = {};
    for_rows([&](int64_t i) {
      t.u[problem * rows + i] = bad ? nan : t.tau_a * (of(at.a)[i] - of(at.best_rows)[i]);
      mass[0] += of(at.best_rows)[i];
    });
    sum(mass);
    if (rank != 0) return;
    for_columns([&](int64_t j) { t.v[problem * columns + j] = bad ? nan : t.tau_b * (of(at.b)[j] - of(at.best_columns)[j]); });
    if (threadIdx.x == 0) {
      t.value[problem] = bad ? nan : certificate.value;
      t.mass[problem] = bad ? nan : mass[0];
      t.gap[problem] = certificate.gap;
      t.iterations[problem] = done;
    }
  }
};

__global__ void __launch_bounds__(TEAM_THREADS, TEAM_BLOCKS)
    solve_in_team(const Transport t, const TeamSize size, double* memory, unsigned long long* counters) {
  SHARED(of_warps, double[MOST_SUMS * 32]);
  SHARED(of_groups, double[TEAM_WARPS * GROUP]);
  SHARED(places, Places);
  const int64_t team = blockIdx.x / size.blocks;
  for (int64_t problem = team; problem < t.problems; problem += size.teams) {
    Team solver(t, size, problem, memory + team * size.words(t), counters + team, of_warps, of_groups, places);
    solver.solve();
    solver.wait();  // its memory is the next problem's
  }
}

// ---- on the host ----

TeamSize team_size(const Transport& t) {
  const int64_t groups = (t.rows + GROUP - 1) / GROUP, most = groups < MOST_BLOCKS ? groups : MOST_BLOCKS;
  const int64_t room = static_cast<int64_t>(multiprocessors()) * blocks_at_a_time({1, TEAM_THREADS}, solve_in_team);
  const int64_t blocks = most < room ? most : room > 0 ? room : 1;
  const int64_t teams = room / blocks < t.problems ? room / blocks : t.problems;
  return {blocks, teams > 0 ? teams : 1};
}

const char* launch_teams(const Transport& t, double* words, Stream stream) {
  const TeamSize size = team_size(t);
  unsigned long long* const counters = reinterpret_cast<unsigned long long*>(words);
  if (const char* error = fill_zero(words, sizeof(double) * size.teams, stream)) return error;
  const Shape shape = {static_cast<unsigned>(size.blocks * size.teams), TEAM_THREADS, 0, true};
  return launch(shape, stream, solve_in_team, t, size, words + size.teams, counters);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_unbalanced_ot_team_words(const fedkernels::cuda::Transport* transport) {
  using namespace fedkernels::cuda;
  if (transport->problems == 0) return 0;
  const TeamSize size = team_size(*transport);
  return size.teams * (1 + size.words(*transport));
}

extern "C" const char* cuda_unbalanced_ot_team(const fedkernels::cuda::Transport* transport, double* words,
                                               fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  const Transport& t = *transport;
  return t.problems == 0 ? nullptr : launch_teams(t, words, stream);
}

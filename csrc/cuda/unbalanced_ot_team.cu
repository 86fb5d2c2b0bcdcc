// Unbalanced optimal transport of any size, and FedU2's steepest descent: a problem is a team's. The blocks of a team
// run at the same time and wait for each other; the entries lie in global memory, where the second-level cache holds
// them.
#include "cuda/unbalanced_ot_solver.h"

namespace fedkernels::cuda {

namespace {

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
// entries all the time. Of vectors over the rows a block uses its own rows only; of those over the columns each has a
// copy, and the copies are equal. What is for all blocks is written between two barriers and read by __ldcg.
struct Team {
  const Transport& t;
  const int64_t rows, columns, problem, blocks, rank, groups, first;  // first: entry of all problems' matrices
  unsigned long long* counter;
  double* of_warps;   // shared memory, [MOST_SUMS, 32]
  double* of_groups;  // shared memory, [TEAM_WARPS, GROUP]
  double *plan, *point;
  double *a, *u, *plan_rows, *point_rows, *trial_rows, *best_rows, *room_rows, *room_rows2;
  double *b, *v, *plan_columns, *point_columns, *trial_columns, *best_columns, *room_columns, *room_columns2, *partial;
  double *reduced, *sums;  // for all blocks: [columns], [2, blocks, MOST_SUMS]
  int turn = 0;

  __device__ Team(const Transport& t, const TeamSize& size, int64_t problem, double* memory, unsigned long long* counter,
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

  // Calls body(i, j, index) for this thread's entries. Bodies store, and a load cannot be moved before that: nothing
  // would be gained from unrolled loops.
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

  // entry(i, j, index) -> a Pair. Reduces the first over each row, into for_rows, and the second over each column of
  // this block's rows, into `partial`.
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

  // As in unbalanced_ot_block.cu.
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

  // Sums the trial's columns and gives tau_a |move 1|^2 + tau_b |move' 1|^2 of the move from the point, with other
  // sums.
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
    double counts[2] = {};  // entries that are not finite numbers, entries worth their cost
    for_rows([&](int64_t i) {
      a[i] = read_one(t.a, problem * rows + i);
      counts[0] += !(fabs(a[i]) < infinite());
      plan_rows[i] = point_rows[i] = best_rows[i] = 0;
      u[i] = t.tau_a * a[i];
    });
    for_columns([&](int64_t j) {
      b[j] = read_one(t.b, problem * columns + j);
      counts[0] += !(fabs(b[j]) < infinite());
      plan_columns[j] = point_columns[j] = best_columns[j] = 0;
      v[j] = t.tau_b * b[j];
    });
    __syncthreads();
    for_entries([&](int64_t i, int64_t j, int64_t index) {
      const double here = cost(index);
      counts[0] += !(here > -infinite());
      counts[1] += u[i] + v[j] - here > 0;
      plan[index] = point[index] = 0;
    });
    sum(counts);
    const bool bad = counts[0] > 0;
    const double nan = not_a_number();
    for_entries([&](int64_t, int64_t, int64_t index) { write_wide(t.plan, first + index, bad ? nan : 0); });
    double start[1] = {penalties_part()};
    sum(start);
    Certificate certificate = {start[0], start[0], -infinite(), bad ? nan : counts[1] > 0 ? infinite() : 0};
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
      for_entries([&](int64_t, int64_t, int64_t index) {
        const double here = plan[index] > 0 ? cost(index) * plan[index] : 0;
        value[0] += here;
        value[1] += fabs(here);
      });
      sum(value);
      if (certificate.improves(value[0], value[1], value[2])) {
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
      certificate.raise(bounds[0] > bounds[1] ? bounds[0] : bounds[1]);
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
      t.value[problem] = bad ? nan : certificate.value;
      t.mass[problem] = bad ? nan : mass[0];
      t.gap[problem] = certificate.gap;
      t.iterations[problem] = done;
    }
  }
};

__global__ void __launch_bounds__(TEAM_THREADS, 1)
    solve_in_team(const Transport t, const TeamSize size, double* memory, unsigned long long* counters) {
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
  if (const char* error = check_cost(t)) return error;
  return t.problems == 0 ? nullptr : launch_teams(t, words, stream);
}

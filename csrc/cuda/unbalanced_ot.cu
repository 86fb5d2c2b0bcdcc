// Unbalanced optimal transport: a problem is a team's. Up to 128 x 128 the team is one block, and its memory is shared
// memory as far as there is room. Larger problems have several blocks that run at the same time and wait for each
// other, and all lies in global memory, where the second-level cache holds it.
//
// The algorithm is that of fedkernels/reference/unbalanced_ot.py, step for step and in float64: the whole solve is one
// launch. The work of a step differs, as it does in csrc/cpu/unbalanced_ot.cpp: the quadratic depends on the plan only
// through its row and column sums, so one pass over the entries forms all that the line search and the restart need.
// A step that is accepted computes its entries a second time instead of keeping them.
#include "cuda/unbalanced_ot_team.h"

namespace fedkernels::cuda {

namespace {

constexpr int CHECK_EVERY = 10;  // steps between two checks of the gap, as in the reference
constexpr double ROUNDING = 8 * 2.2204460492503131e-16;  // as in the reference

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
  double value, size, bound, gap, rounding;

  __device__ bool improves(double linear, double of_size, double penalties) {
    if (!(linear + penalties < value)) return false;
    value = linear + penalties;
    size = of_size + penalties;
    return true;
  }
  __device__ void raise(double lower) {
    bound = lower > bound ? lower : bound;
    gap = value - bound <= rounding ? 0 : (value - bound) / size;
  }
};

template <bool ALONE>
struct Solver : Team<ALONE> {
  using Base = Team<ALONE>;
  using Base::t, Base::layout, Base::problem, Base::rows, Base::columns, Base::thread, Base::rank;
  using Base::by_column, Base::by_row, Base::of, Base::over_crews, Base::seen, Base::sum, Base::wait;
  using Base::for_columns, Base::for_entries, Base::for_rows, Base::for_shared_columns, Base::reduce_entries;

  // The largest u for v and v for u: min_j(cost_ij - v_j) and min_i(cost_ij - u_i), at most tau_a a_i and tau_b b_j.
  __device__ void largest_feasible(int from, int to) {
    reduce_entries(INFINITY, Least(), from, to, [&](const Entry& e) -> Pair { return {e.cost - e.v, e.cost - e.u}; });
    for_rows([&](int i) { by_row(to)[i] = least(t.tau_a * by_row(MASSES)[i], by_row(to)[i]); });
    wait();
    double* const reduced = of(layout.reduced());
    for_shared_columns([&](int j) { reduced[j] = least(t.tau_b * by_column(MASSES)[j], over_crews(j, Least())); });
    wait();
    for_columns([&](int j) { by_column(to)[j] = seen(reduced + j); });
    __syncthreads();
  }

  // This thread's part: the rows of its block; the columns are counted by the first block alone.
  __device__ double dual_part(int of_u, int of_v) const {
    double part = 0;
    for_rows([&](int i) {
      const double here = by_row(of_u)[i];
      part += by_row(MASSES)[i] * here - square(here) / (2 * t.tau_a);
    });
    if (rank != 0) return part;
    for_columns([&](int j) {
      const double here = by_column(of_v)[j];
      part += by_column(MASSES)[j] * here - square(here) / (2 * t.tau_b);
    });
    return part;
  }
  __device__ double penalties_part() const {
    double part = 0;
    for_rows([&](int i) { part += t.tau_a / 2 * square(by_row(OF_PLAN)[i] - by_row(MASSES)[i]); });
    if (rank != 0) return part;
    for_columns([&](int j) { part += t.tau_b / 2 * square(by_column(OF_PLAN)[j] - by_column(MASSES)[j]); });
    return part;
  }

  // Sums the trial's columns and gives tau_a |move 1|^2 + tau_b |move' 1|^2 of the move from the point, with other
  // sums.
  __device__ void sum_trial(double (&moved)[3]) {
    for_rows([&](int i) { moved[2] += t.tau_a * square(by_row(OF_TRIAL)[i] - by_row(OF_POINT)[i]); });
    wait();
    double* const reduced = of(layout.reduced());
    for_shared_columns([&](int j) {
      const double value = over_crews(j, Sum());
      reduced[j] = value;
      moved[2] += t.tau_b * square(value - by_column(OF_POINT)[j]);
    });
    sum(moved);
    for_columns([&](int j) { by_column(OF_TRIAL)[j] = seen(reduced + j); });
  }

  // The trial becomes the plan, and the point lies `weight` beyond it.
  __device__ void move_sums(double weight) {
    __syncthreads();  // u and v have been read
    for_rows([&](int i) {
      const double next = by_row(OF_TRIAL)[i], point = next + weight * (next - by_row(OF_PLAN)[i]);
      by_row(OF_PLAN)[i] = next;
      by_row(OF_POINT)[i] = point;
      by_row(DUALS)[i] = t.tau_a * (by_row(MASSES)[i] - point);
    });
    for_columns([&](int j) {
      const double next = by_column(OF_TRIAL)[j], point = next + weight * (next - by_column(OF_PLAN)[j]);
      by_column(OF_PLAN)[j] = next;
      by_column(OF_POINT)[j] = point;
      by_column(DUALS)[j] = t.tau_b * (by_column(MASSES)[j] - point);
    });
    __syncthreads();
  }

  // A forbidden entry has an infinite gradient and stays 0.
  __device__ static double stepped(const Entry& e, double length) {
    return positive_part(e.point - length * (e.cost - e.u - e.v));
  }

  __device__ void accelerated_step(Search& search) {
    const double length = 1 / search.curvature;
    double moved[3] = {};
    reduce_entries(0, Sum(), DUALS, OF_TRIAL, [&](const Entry& e) -> Pair {
      const double next = stepped(e, length), move = next - e.point;
      moved[0] += square(move);
      moved[1] += move * (next - e.plan);
      return {next, next};
    });
    sum_trial(moved);
    if (!search.accept(t.tau_a + t.tau_b, moved[2], moved[0], moved[1])) return;
    for_entries([&](int64_t, const Entry& e) {
      const double next = stepped(e, length);
      *e.point_at = next + search.weight * (next - e.plan);
      *e.plan_at = next;
    });
    move_sums(search.weight);
  }

  // FedU2's Eq. 6 with the reference's guards. The point is the plan.
  __device__ void steepest_step(double& shorten) {
    const auto gradient = [](const Entry& e) { return e.cost < INFINITY ? e.cost - e.u - e.v : 0; };
    double along[2] = {};
    reduce_entries(0, Sum(), DUALS, OF_TRIAL, [&](const Entry& e) -> Pair {
      const double value = gradient(e);
      along[0] += square(value);
      return {value, value};
    });
    for_rows([&](int i) { along[1] += t.tau_a * square(by_row(OF_TRIAL)[i]); });
    wait();
    for_shared_columns([&](int j) { along[1] += t.tau_b * square(over_crews(j, Sum())); });
    sum(along);
    const double limit = t.tau_a * columns + t.tau_b * rows;  // the largest eigenvalue
    const double length = shorten * (along[1] > 1e-6 * limit * along[0] ? along[0] / along[1] : 1 / limit);

    double moved[3] = {};  // the first: <gradient, move>
    reduce_entries(0, Sum(), DUALS, OF_TRIAL, [&](const Entry& e) -> Pair {
      const double slope = gradient(e), next = positive_part(e.plan - length * slope);
      moved[0] += slope * (next - e.plan);
      return {next, next};
    });
    sum_trial(moved);
    const bool good = moved[0] + moved[2] / 2 <= 1e-4 * moved[0];
    shorten = good ? 1 : shorten / 2;
    if (!good) return;
    for_entries([&](int64_t, const Entry& e) { *e.plan_at = positive_part(e.plan - length * gradient(e)); });
    move_sums(0);
  }

  // Offers the plan and the bound that follows from its duals.
  __device__ void check(Certificate& certificate) {
    double value[3] = {0, 0, penalties_part()};  // <cost, plan>, <|cost|, plan>; a forbidden entry costs 0
    for_entries([&](int64_t, const Entry& e) {
      const double here = e.plan > 0 ? e.cost * e.plan : 0;
      value[0] += here;
      value[1] += fabs(here);
    });
    sum(value);
    if (certificate.improves(value[0], value[1], value[2])) {
      for_entries([&](int64_t index, const Entry& e) { write_one(t.plan, index, e.plan); });
      for_rows([&](int i) { by_row(OF_BEST)[i] = by_row(OF_PLAN)[i]; });
      for_columns([&](int j) { by_column(OF_BEST)[j] = by_column(OF_PLAN)[j]; });
    }
    // The dual value of the plan's u and v, made feasible by shrinking either first. OF_TRIAL is free until the next
    // step.
    for_rows([&](int i) { by_row(OF_TRIAL)[i] = t.tau_a * (by_row(MASSES)[i] - by_row(OF_PLAN)[i]); });
    for_columns([&](int j) { by_column(OF_TRIAL)[j] = t.tau_b * (by_column(MASSES)[j] - by_column(OF_PLAN)[j]); });
    __syncthreads();
#pragma unroll 1
    for (int round = 0; round < 2; ++round) largest_feasible(round ? ROOM : OF_TRIAL, round ? OF_TRIAL : ROOM);
    double bounds[2] = {dual_part(ROOM, OF_TRIAL), dual_part(OF_TRIAL, ROOM)};
    sum(bounds);
    certificate.raise(bounds[0] > bounds[1] ? bounds[0] : bounds[1]);
  }

  __device__ void solve() {
    double counts[2] = {};  // entries that are not finite numbers, entries worth their cost
    for_rows([&](int i) {
      const double mass = read_one(t.a, problem * rows + i);
      counts[0] += !(fabs(mass) < INFINITY);
      by_row(MASSES)[i] = mass;
      by_row(DUALS)[i] = t.tau_a * mass;
      by_row(OF_PLAN)[i] = by_row(OF_POINT)[i] = by_row(OF_BEST)[i] = 0;
    });
    for_columns([&](int j) {
      const double mass = read_one(t.b, problem * columns + j);
      counts[0] += !(fabs(mass) < INFINITY);
      by_column(MASSES)[j] = mass;
      by_column(DUALS)[j] = t.tau_b * mass;
      by_column(OF_PLAN)[j] = by_column(OF_POINT)[j] = by_column(OF_BEST)[j] = 0;
    });
    __syncthreads();
    for_entries([&](int64_t, const Entry& e) {
      counts[0] += !(e.cost > -INFINITY);
      counts[1] += e.u + e.v - e.cost > 0;
      *e.plan_at = *e.point_at = 0;
    });
    sum(counts);
    const bool bad = counts[0] > 0;
    for_entries([&](int64_t index, const Entry&) { write_one(t.plan, index, bad ? NAN : 0); });
    double start[1] = {penalties_part()};
    sum(start);
    Certificate certificate = {start[0], start[0], -INFINITY, bad ? NAN : counts[1] > 0 ? INFINITY : 0,
                               ROUNDING * start[0]};
    Search search = {t.tau_a + t.tau_b, 1, 0};
    double shorten = 1;
    int64_t iteration = 0;
    while (iteration < t.max_iterations && certificate.gap > t.tol) {
      if (t.accelerated) {
        accelerated_step(search);
      } else {
        steepest_step(shorten);
      }
      ++iteration;
      if (iteration % CHECK_EVERY == 0 || iteration == t.max_iterations) check(certificate);
    }

    __syncthreads();
    double mass[1] = {};
    for_rows([&](int i) {
      t.u[problem * rows + i] = bad ? NAN : t.tau_a * (by_row(MASSES)[i] - by_row(OF_BEST)[i]);
      mass[0] += by_row(OF_BEST)[i];
    });
    sum(mass);
    if (rank != 0) return;
    for_columns([&](int j) {
      t.v[problem * columns + j] = bad ? NAN : t.tau_b * (by_column(MASSES)[j] - by_column(OF_BEST)[j]);
    });
    if (thread == 0) {
      t.value[problem] = bad ? NAN : certificate.value;
      t.mass[problem] = bad ? NAN : mass[0];
      t.gap[problem] = certificate.gap;
      t.iterations[problem] = iteration;
    }
  }
};

template <bool ALONE>
__global__ void __launch_bounds__(ALONE ? ALONE_THREADS : TEAM_THREADS, ALONE ? 1 : TEAM_BLOCKS)
    unbalanced_ot_kernel(const Transport t, const Layout layout, int64_t teams, double* memory,
                         unsigned long long* counters) {
  SHARED(scratch, Scratch);
  const int64_t team = blockIdx.x / layout.blocks;
  for (int64_t problem = team; problem < t.problems; problem += teams) {
    double* const own = memory + team * (layout.end() - layout.in_shared);
    Solver<ALONE> solver = {{t, layout, problem, own, counters + team, scratch}};
    solver.solve();
    solver.wait();  // its memory is the next problem's
  }
}

// ---- on the host ----

struct Teams {
  Layout layout;
  int64_t count;
  bool alone;

  int64_t counters() const { return alone ? 0 : count; }
  int64_t words() const { return counters() + count * (layout.end() - layout.in_shared); }
};

Teams teams_of(const Transport& t) {
  const int rows = static_cast<int>(t.rows), columns = static_cast<int>(t.columns), groups = (rows + GROUP - 1) / GROUP;
  if (rows <= ALONE_LIMIT && columns <= ALONE_LIMIT) {
    // A warp for each group. In shared memory are the vectors, then as many groups of the point, then of the plan, as
    // have room.
    Layout layout = {rows, columns, groups, 1, groups};
    const int64_t room = (shared_limit() - sizeof(Scratch)) / sizeof(double);
    const int fit = static_cast<int>((room - layout.point(0)) / (GROUP * columns));
    layout.in_shared = fit < 2 * groups ? layout.point(fit) : layout.end();
    return {layout, t.problems, true};
  }
  const int most = groups < MOST_BLOCKS ? groups : MOST_BLOCKS;
  const int room = multiprocessors() * blocks_at_a_time({1, TEAM_THREADS}, unbalanced_ot_kernel<false>);
  const int blocks = most < room ? most : room > 0 ? room : 1;
  const int64_t teams = room / blocks < t.problems ? room / blocks : t.problems;
  return {{rows, columns, groups, blocks, blocks}, teams > 0 ? teams : 1, false};
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_unbalanced_ot_words(const fedkernels::cuda::Transport* transport) {
  return fedkernels::cuda::teams_of(*transport).words();
}

extern "C" const char* cuda_unbalanced_ot(const fedkernels::cuda::Transport* transport, double* words,
                                          fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (transport->problems == 0) return nullptr;
  const Teams teams = teams_of(*transport);
  const Layout& layout = teams.layout;
  const unsigned blocks = static_cast<unsigned>(layout.blocks * teams.count);
  const Shape alone = {blocks, 32u * layout.crews, sizeof(double) * layout.in_shared};
  const Shape several = {blocks, TEAM_THREADS, 0, true};
  const char* error = teams.alone ? nullptr : fill_zero(words, sizeof(double) * teams.counters(), stream);
  if (error) return error;
  return launch(teams.alone ? alone : several, stream,
                teams.alone ? unbalanced_ot_kernel<true> : unbalanced_ot_kernel<false>, *transport, layout, teams.count,
                words + teams.counters(), reinterpret_cast<unsigned long long*>(words));
}
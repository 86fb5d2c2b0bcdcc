// The algorithm is that of fedkernels/reference/unbalanced_ot.py on fewer entries. The optimal plan has about two
// positive entries in a row. So the steps are taken on candidates alone, lists of columns for each row, and cost little
// more than the row and column sums through which the quadratic sees the plan. The certificate of the problem on the
// candidates is as cheap. Where it says that this problem is solved well enough, a pass over all entries finds those
// outside whose gradient is negative: the next candidates. In the end the certificate of the whole problem decides.
//
// A problem that is not solved in time, as where tau is large beside the costs, goes on by the interior point.
#include "cpu/unbalanced_ot_interior_point.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

// As in the reference.
constexpr int64_t CHECK_EVERY = 10;
constexpr int64_t LEAST_PATIENCE = 1000;
constexpr int64_t MOST_INTERIOR_STEPS = 100;
constexpr double ROUNDING = 8 * __DBL_EPSILON__;

// The steps after which the interior point takes over: about as much work as it then needs.
inline int64_t patience(const TransportProblem& problem) {
  if (problem.method == TransportMethod::steepest) return problem.max_iterations;
  if (problem.method == TransportMethod::interior_point) return 0;
  const int64_t rows = problem.rows, columns = problem.columns, shorter = rows < columns ? rows : columns;
  const int64_t equal_work = rows * columns * shorter / (16 * (rows + columns));
  return equal_work > LEAST_PATIENCE ? equal_work : LEAST_PATIENCE;
}

// The following govern the work, not the result.
constexpr double FIRST_GOAL = 0.02;   // the gap on the first candidates at which the others are looked at
constexpr double GOAL_FACTOR = 0.5;   // the next goal, of the gap reached
constexpr double FIRST_DEPTH = 0.3;   // first candidates: from the least gradient of a row or column towards its mean
constexpr double DEPTH = 0.7;         // next candidates: gradients at least this part of the least of the row
constexpr int64_t FIRST_SHARE = 32;   // first candidates for each row and column where that can be had

// The candidates with the steps of the method and the certificates.
struct Solver : Candidates {
  using Candidates::Candidates;

  double penalties(const Plan& at) const {
    return tau_a / 2 * sum_of_squares(at.row_sums, a, row_pitch) + tau_b / 2 * sum_of_squares(at.column_sums, b, pitch);
  }

  // <cost, plan> and <|cost|, plan>.
  void linear(const Plan& at, double* signed_part, double* size_part) const {
    Vec total{}, size{};
    for (int64_t k = 0; k < candidates; k += LANES) {
      const Vec c = load(cost + k), x = load(at.entries + k);
      const Vec product = x > 0 ? c * x : Vec{};
      total += product;
      size += product < 0 ? -product : product;
    }
    *signed_part = sum(total);
    *size_part = sum(size);
  }

  double dual_value(const double* u, const double* v) const {
    return dual_part(a, u, tau_a, row_pitch) + dual_part(b, v, tau_b, pitch);
  }

  // out.u_i = min_j(cost_ij - at.v_j) and out.v_j = min_i(cost_ij - at.u_i), at most tau_a a_i and tau_b b_j.
  void largest_feasible_of_candidates(const Duals& at, const Duals& out) const {
    for (int64_t j = 0; j < pitch; ++j) out.v[j] = tau_b * b[j];
    for (int64_t i = 0; i < rows; ++i) {
      Vec low = splat(tau_a * a[i]);
      const Vec ui = splat(at.u[i]);
      for (int64_t k = first[i]; k < end_of(i); k += LANES) {
        const Vec c = load(cost + k), room = c - ui;
        low = min(c - gather(at.v, column + k), low);
        for (int lane = 0; lane < LANES; ++lane) {
          double& lowest = out.v[column[k + lane]];
          lowest = min(room[lane], lowest);
        }
      }
      out.u[i] = least(low);
    }
  }

  // The same over all entries.
  void largest_feasible(const Duals& at, const Duals& out) const {
    for (int64_t j = 0; j < pitch; ++j) out.v[j] = tau_b * b[j];
    for (int64_t i = 0; i < rows; ++i) {
      read_row(i);
      out.u[i] = min(tau_a * a[i], largest_feasible_of_row(at, i, out.v));
    }
  }

  double largest_feasible_of_row(const Duals& at, int64_t i, double* lowest) const {
    const Vec ui = splat(at.u[i]);
    Vec low = splat(INFINITE);
    for (int64_t j = 0; j < pitch; j += LANES) {
      const Vec c = load(row + j);
      low = min(c - load(at.v + j), low);
      store(lowest + j, min(c - ui, load(lowest + j)));
    }
    return least(low);
  }

  // `feasible` at the plan over all entries. Lists the missing candidates in the trial plan's memory: entries whose
  // gradient at the plan is negative and at least DEPTH of the row's least gradient.
  void look_at_all() const {
    duals_at_plan();
    const Duals at = at_plan, out = feasible;
    int32_t* list = (int32_t*)trial.entries;
    for (int64_t j = 0; j < pitch; ++j) out.v[j] = tau_b * b[j];
    for (int64_t i = 0; i < rows; ++i) {
      read_row(i);
      const double low = largest_feasible_of_row(at, i, out.v);
      out.u[i] = min(tau_a * a[i], low);
      missing[i] = 0;
      if (!(low < at.u[i])) continue;
      const double highest = at.u[i] - DEPTH * (at.u[i] - low);
      int64_t known = first[i];
      for (int64_t j = 0; j < pitch; j += LANES) {
        const Vec room = load(row + j) - load(at.v + j);
        if (!any_sign((Vec)(room <= splat(highest)))) continue;
        for (int lane = 0; lane < LANES; ++lane) {
          if (!(room[lane] <= highest && room[lane] < at.u[i])) continue;
          const int32_t entry = (int32_t)(j + lane);
          while (known < first[i] + count[i] && column[known] < entry) ++known;
          if (known < first[i] + count[i] && column[known] == entry) continue;
          list[missing[i]++] = entry;
        }
      }
      list += missing[i];
    }
  }

  void duals_at_plan() const {
    duals(a, plan.row_sums, plan.row_sums, 0, tau_a, row_pitch, at_plan.u);
    duals(b, plan.column_sums, plan.column_sums, 0, tau_b, pitch, at_plan.v);
  }

  double larger_dual_value() const {
    return max(dual_value(feasible.u, partner.v), dual_value(partner.u, feasible.v));
  }

  // A lower bound on the optimum: the dual value of the plan's u and v, made feasible by shrinking either first. Each
  // is then completed by its best partner.
  double whole_bound() const {
    largest_feasible(feasible, partner);
    return larger_dual_value();
  }

  // The same for the problem on the candidates alone, whose optimum is not below.
  double bound_of_candidates() const {
    duals_at_plan();
    largest_feasible_of_candidates(at_plan, feasible);
    largest_feasible_of_candidates(feasible, partner);
    return larger_dual_value();
  }

  void copy(const Plan& from, const Plan& to) const {
    __builtin_memcpy(to.entries, from.entries, candidates * 8);
    __builtin_memcpy(to.row_sums, from.row_sums, rows * 8);
    __builtin_memcpy(to.column_sums, from.column_sums, columns * 8);
  }

  // tau (masses - sums of the point now + weight (now - before)).
  static void duals(const double* masses, const double* now, const double* before, double weight, double tau,
                    int64_t count, double* out) {
    const Vec inertia = splat(weight), price = splat(tau);
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec x = load(now + i);
      store(out + i, price * (load(masses + i) - x - inertia * (x - load(before + i))));
    }
  }

  // |the sums of the move from the point now + weight (now - before) to next|^2.
  static double move_square(const double* next, const double* now, const double* before, double weight, int64_t count) {
    const Vec inertia = splat(weight);
    Vec total{};
    for (int64_t i = 0; i < count; i += LANES) {
      const Vec x = load(now + i), move = load(next + i) - (x + inertia * (x - load(before + i)));
      total += move * move;
    }
    return sum(total);
  }

  // The quadratic of the move from the point plan + weight (plan - previous) to the trial.
  double curvature_of_move(double weight) const {
    return tau_a * move_square(trial.row_sums, plan.row_sums, previous.row_sums, weight, row_pitch) +
           tau_b * move_square(trial.column_sums, plan.column_sums, previous.column_sums, weight, pitch);
  }

  void duals_at_point(double weight) const {
    duals(a, plan.row_sums, previous.row_sums, weight, tau_a, row_pitch, point.u);
    duals(b, plan.column_sums, previous.column_sums, weight, tau_b, pitch, point.v);
  }

  // trial = max(0, point - step * gradient(point)), with its sums, |move|^2 and <move, trial - plan>.
  void step(double weight, double step_length, double* move_square, double* move_advance) const {
    const Vec inertia = splat(weight), length = splat(step_length);
    for (int64_t j = 0; j < pitch; ++j) trial.column_sums[j] = 0;
    Vec squares{}, advances{};
    for (int64_t i = 0; i < rows; ++i) {
      const Vec ui = splat(point.u[i]);
      Vec row_sum{};
      for (int64_t k = first[i]; k < end_of(i); k += LANES) {
        const Vec x = load(plan.entries + k), before = load(previous.entries + k);
        const Vec gradient = load(cost + k) - gather(point.v, column + k) - ui;
        const Vec from = x + inertia * (x - before);
        const Vec next = max(from - length * gradient, Vec{});
        const Vec move = next - from;
        squares += move * move;
        advances += move * (next - x);
        row_sum += next;
        store(trial.entries + k, next);
        for (int lane = 0; lane < LANES; ++lane) trial.column_sums[column[k + lane]] += next[lane];
      }
      trial.row_sums[i] = sum(row_sum);
    }
    *move_square = sum(squares);
    *move_advance = sum(advances);
  }

  void rotate() {
    const Plan free = previous;
    previous = plan;
    plan = trial;
    trial = free;
  }

  // FISTA with a backtracking line search and adaptive restart.
  double momentum = 1, weight = 0, curvature = 0;

  void accelerated_step() {
    const double single = tau_a + tau_b;  // the curvature of one entry, where the search starts
    if (curvature == 0) curvature = single;
    duals_at_point(weight);
    double move_square, move_advance;
    step(weight, 1 / curvature, &move_square, &move_advance);
    if (curvature_of_move(weight) <= curvature * move_square) {
      const bool restart = move_advance < 0;  // the momentum points uphill
      const double next = (1 + __builtin_sqrt(1 + 4 * momentum * momentum)) / 2;
      // fault: (momentum - 1) -> momentum
      weight = restart ? 0 : (momentum - 1) / next;
      momentum = restart ? 1 : next;
      curvature = max(curvature * 0.9, 1e-3 * single);
      rotate();
    } else {
      curvature *= 2;
    }
  }

  // FedU2's Eq. 6 with the reference's guards.
  double shorten = 1;

  void steepest_step() {
    duals_at_point(0);
    const auto gradient = [this](int64_t i, int64_t k) { return cost[k] - point.u[i] - point.v[column[k]]; };
    for (int64_t j = 0; j < pitch; ++j) trial.column_sums[j] = 0;
    double squares = 0, of_rows = 0, of_columns = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double row_sum = 0;
      for (int64_t k = first[i]; k < first[i] + count[i]; ++k) {
        const double g = gradient(i, k);
        squares += g * g;
        row_sum += g;
        trial.column_sums[column[k]] += g;
      }
      of_rows += square(row_sum);
    }
    for (int64_t j = 0; j < columns; ++j) of_columns += square(trial.column_sums[j]);
    const double along = tau_a * of_rows + tau_b * of_columns;
    const double largest = tau_a * columns + tau_b * rows;  // eigenvalue
    const double length = shorten * (along > 1e-6 * largest * squares ? squares / along : 1 / largest);

    for (int64_t j = 0; j < pitch; ++j) trial.column_sums[j] = 0;
    double slope = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double row_sum = 0;
      for (int64_t k = first[i]; k < first[i] + count[i]; ++k) {
        const double g = gradient(i, k), next = max(plan.entries[k] - length * g, 0.0);
        slope += g * (next - plan.entries[k]);
        trial.entries[k] = next;
        trial.column_sums[column[k]] += next;
        row_sum += next;
      }
      for (int64_t k = first[i] + count[i]; k < end_of(i); ++k) trial.entries[k] = 0;
      trial.row_sums[i] = row_sum;
    }
    if (slope + curvature_of_move(0) / 2 <= 1e-4 * slope) {
      rotate();
      shorten = 1;
    } else {
      shorten /= 2;
    }
  }

  void write_plan(const TransportSolution& solution) const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) row[j] = 0;
      for (int64_t k = first[i]; k < first[i] + count[i]; ++k) row[column[k]] = best.entries[k];
      // fault: i * columns, row -> i * rows, row
      write(solution.plan.data, solution.plan.dtype, solution.plan_start + i * columns, row, columns);
    }
  }
};

}  // namespace

void unbalanced_ot(const TransportProblem& problem, double* workspace, TransportSolution* solution) {
  Solver solver(problem, workspace);
  const int64_t rows = problem.rows, columns = problem.columns;
  solution->iterations = 0;
  if (!solver.survey()) {
    const double nan = __builtin_nan("");
    for (int64_t j = 0; j < columns; ++j) solver.b[j] = nan;
    for (int64_t i = 0; i < rows; ++i) {
      write(solution->plan.data, solution->plan.dtype, solution->plan_start + i * columns, solver.b, columns);
      solution->u[i] = nan;
    }
    for (int64_t j = 0; j < columns; ++j) solution->v[j] = nan;
    solution->value = solution->gap = solution->mass = nan;
    return;
  }

  double gap = solver.nothing_pays() ? 0 : INFINITE, goal = problem.tol, gap_at_drop = INFINITE;
  const bool on_candidates = problem.method != TransportMethod::steepest;
  if (gap > 0) {
    if (on_candidates) {
      goal = max(FIRST_GOAL, problem.tol);
      double depth = FIRST_DEPTH;
      solver.first_candidates(depth);
      while (solver.candidates > FIRST_SHARE * (rows + columns) && depth > 0.01) solver.first_candidates(depth /= 2);
    } else {
      solver.all_candidates();
    }
  }
  double best_value = solver.penalties(solver.best), best_size = best_value, best_bound = -INFINITE;
  const double rounding = ROUNDING * best_value;
  const auto gap_to = [&](double bound, double hidden) {
    const double distance = best_value - bound;
    return distance <= hidden ? 0.0 : distance / best_size;
  };
  InteriorPoint interior(problem, solver.a, solver.b, workspace + candidates_workspace(rows, columns));
  const int64_t in_time = patience(problem);
  bool best_is_interior = false, interior_has_run = false;
  int64_t iteration = 0;
  while (iteration < problem.max_iterations && gap > problem.tol) {
    if (iteration == in_time && !interior_has_run) {
      interior_has_run = true;  // if rounding keeps it from the tolerance, the steps on candidates go on
      interior.start();
      const int64_t most = problem.max_iterations - iteration;
      const int64_t end = iteration + (most < MOST_INTERIOR_STEPS ? most : MOST_INTERIOR_STEPS);
      while (iteration < end && gap > problem.tol && interior.step()) {
        solution->iterations = ++iteration;
        best_bound = max(interior.bound(), best_bound);
        for (int attempt = 0; attempt < 2; ++attempt) {  // the sparse plan, and where that is not good enough the whole
          const InteriorPoint::Value now = interior.value(attempt == 0);
          if (now.value < best_value) {
            best_value = now.value;
            best_size = now.size;
            interior.keep(solver.best.row_sums, solver.best.column_sums);
            best_is_interior = true;
          }
          // Its duals are no differences: less is hidden by rounding, unless the optimum is 0.
          gap = gap_to(best_bound, best_size > rounding ? ROUNDING * best_size : rounding);
          if (gap <= problem.tol) break;
        }
      }
      if (gap > problem.tol) gap = gap_to(best_bound, rounding);
      continue;
    }
    ++iteration;
    if (on_candidates) {
      solver.accelerated_step();
    } else {
      solver.steepest_step();
    }
    const bool last = iteration == problem.max_iterations;
    if (iteration % CHECK_EVERY && !last) continue;
    double linear, size;
    solver.linear(solver.plan, &linear, &size);
    const double penalties = solver.penalties(solver.plan);
    if (linear + penalties < best_value) {
      best_value = linear + penalties;
      best_size = size + penalties;
      solver.copy(solver.plan, solver.best);
      best_is_interior = false;
    }
    if (on_candidates && !last && gap_to(solver.bound_of_candidates(), rounding) > goal) continue;

    solution->iterations = iteration;
    solver.look_at_all();
    best_bound = max(solver.whole_bound(), best_bound);
    gap = gap_to(best_bound, rounding);
    if (on_candidates && gap > problem.tol) {
      if (gap < gap_at_drop / 2) {  // so that none can come and go for ever
        solver.drop_idle();
        gap_at_drop = gap;
      }
      solver.add_missing();
      goal = max(gap * GOAL_FACTOR, problem.tol);
    }
  }

  if (best_is_interior) {
    for (int64_t i = 0; i < rows; ++i) {
      interior.read_row(i, solver.row);
      write(solution->plan.data, solution->plan.dtype, solution->plan_start + i * columns, solver.row, columns);
    }
  } else {
    solver.write_plan(*solution);
  }
  double mass = 0;
  for (int64_t i = 0; i < rows; ++i) {
    solution->u[i] = solver.tau_a * (solver.a[i] - solver.best.row_sums[i]);
    mass += solver.best.row_sums[i];
  }
  for (int64_t j = 0; j < columns; ++j) solution->v[j] = solver.tau_b * (solver.b[j] - solver.best.column_sums[j]);
  solution->value = best_value;
  solution->gap = gap;
  solution->mass = mass;
}

}  // namespace fedkernels::FEDKERNELS_ISA

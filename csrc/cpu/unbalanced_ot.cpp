// The algorithm is that of fedkernels/reference/unbalanced_ot.py on fewer entries. The optimal plan has about two
// positive entries in a row. So the steps are taken on candidates alone, lists of columns for each row, and cost little
// more than the row and column sums through which the quadratic sees the plan. The certificate of the problem on the
// candidates is as cheap. Where it says that this problem is solved well enough, a pass over all entries finds those
// outside whose gradient is negative: the next candidates. In the end the certificate of the whole problem decides.
#include "cpu/unbalanced_ot.h"

#include "cpu/simd.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int64_t GROUP = TRANSPORT_GROUP;
constexpr int64_t CHECK_EVERY = 10;  // as in the reference
const double INFINITE = __builtin_inf();

// The following govern the work, not the result.
constexpr double FIRST_GOAL = 0.02;   // the gap on the first candidates at which the others are looked at
constexpr double GOAL_FACTOR = 0.5;   // the next goal, of the gap reached
constexpr double FIRST_DEPTH = 0.3;   // first candidates: from the least gradient of a row or column towards its mean
constexpr double DEPTH = 0.7;         // next candidates: gradients at least this part of the least of the row
constexpr int64_t FIRST_SHARE = 32;   // first candidates for each row and column where that can be had

inline Vec min(Vec x, Vec y) { return x < y ? x : y; }
inline Vec max(Vec x, Vec y) { return x > y ? x : y; }
inline double min(double x, double y) { return x < y ? x : y; }
inline double max(double x, double y) { return x > y ? x : y; }
inline double square(double x) { return x * x; }
inline double least(Vec v) {
  double value = v[0];
  for (int lane = 1; lane < LANES; ++lane) value = min(value, v[lane]);
  return value;
}
inline bool any_below(Vec x, Vec limit) { return any_sign((Vec)(x < limit)); }

inline Vec gather(const double* from, const int32_t* index) {
  Vec v;
  for (int lane = 0; lane < LANES; ++lane) v[lane] = from[index[lane]];
  return v;
}

// Over vectors that are padded with 0 to full groups.
inline double sum_of_squares(const double* x, const double* y, int64_t count) {  // |x - y|^2
  Vec total{};
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec d = load(x + i) - load(y + i);
    total += d * d;
  }
  return sum(total);
}

inline double dual_part(const double* masses, const double* duals, double tau, int64_t count) {
  Vec total{};
  for (int64_t i = 0; i < count; i += LANES) {
    const Vec d = load(duals + i);
    total += load(masses + i) * d - d * d / (2 * tau);
  }
  return sum(total);
}

struct Plan {
  double* entries;  // of each candidate
  double* row_sums;
  double* column_sums;
};

struct Duals {
  double* u;
  double* v;
};

struct Solver {
  const TransportProblem& problem;
  int64_t rows, columns, row_pitch, pitch;
  double tau_a, tau_b;
  double *a, *b;
  double* row;  // of the cost, widened
  Duals point;  // at the point that the gradient is taken at
  Duals at_plan, feasible, partner, limit;  // of the certificate; the last three also choose the first candidates

  int64_t *first, *count;  // of each row's candidates
  int64_t* found;          // of each row: how many candidates are to come
  int64_t candidates = 0;  // with padding, which has cost = inf and the column `columns`
  int32_t* column;         // ascending in each row
  double* cost;
  Plan plan, previous, trial, best;

  Solver(const TransportProblem& problem, double* workspace)
      : problem(problem), rows(problem.rows), columns(problem.columns), tau_a(problem.tau_a), tau_b(problem.tau_b) {
    row_pitch = transport_pitch(rows);
    pitch = transport_pitch(columns);
    const auto take = [&workspace](int64_t size) {
      double* start = workspace;
      workspace += size;
      return start;
    };
    __builtin_memset(workspace, 0, (13 * row_pitch + 11 * pitch) * 8);
    a = take(row_pitch);
    b = take(pitch);
    row = take(pitch);
    Duals* const duals[] = {&point, &at_plan, &feasible, &partner, &limit};
    for (Duals* each : duals) *each = {take(row_pitch), take(pitch)};
    int64_t** const of_rows[] = {&first, &count, &found};
    for (int64_t** array : of_rows) *array = (int64_t*)take(row_pitch);
    Plan* const plans[] = {&plan, &previous, &trial, &best};
    for (Plan* each : plans) {
      each->row_sums = take(row_pitch);
      each->column_sums = take(pitch);
    }
    for (Plan* each : plans) each->entries = take(rows * pitch);
    cost = take(rows * pitch);
    column = (int32_t*)workspace;
    read(a, problem.a.data, problem.a.dtype, problem.a_start, rows);
    read(b, problem.b.data, problem.b.dtype, problem.b_start, columns);
    for (int64_t j = columns; j < pitch; ++j) row[j] = INFINITE;
  }

  void read_row(int64_t i) const {
    read(row, problem.cost.data, problem.cost.dtype, problem.cost_start + i * columns, columns);
  }

  // The first candidates are chosen by the gradient at plan = 0: cost - tau_a a_i - tau_b b_j, and 0 where it is above.
  // Leaves the least of each row and column in `feasible`, and their means in `partner`.
  // False where the problem holds a NaN, a cost of -inf (no minimum) or an infinite mass.
  bool survey() const {
    bool usable = true;
    for (int64_t i = 0; i < rows; ++i) usable &= __builtin_fabs(a[i]) < INFINITE;
    for (int64_t j = 0; j < columns; ++j) usable &= __builtin_fabs(b[j]) < INFINITE;
    const Duals least_of = feasible, mean_of = partner;
    for (int64_t j = 0; j < pitch; ++j) {
      point.v[j] = tau_b * b[j];
      least_of.v[j] = mean_of.v[j] = 0;
    }
    Vec seen{};
    for (int64_t i = 0; i < rows; ++i) {
      read_row(i);
      point.u[i] = tau_a * a[i];
      const Vec ui = splat(point.u[i]);
      Vec low{}, total{};
      for (int64_t j = 0; j < pitch; j += LANES) {
        const Vec c = load(row + j), gradient = min(c - load(point.v + j) - ui, Vec{});
        seen = c > -INFINITE ? seen : splat(1);
        low = min(gradient, low);
        total += gradient;
        store(least_of.v + j, min(gradient, load(least_of.v + j)));
        store(mean_of.v + j, load(mean_of.v + j) + gradient);
      }
      least_of.u[i] = least(low);
      mean_of.u[i] = sum(total) / columns;
    }
    for (int64_t j = 0; j < columns; ++j) mean_of.v[j] /= rows;
    return usable && sum(seen) == 0;
  }

  // After survey(): where no entry has a negative gradient at plan = 0, plan = 0 is optimal.
  bool nothing_pays() const {
    for (int64_t i = 0; i < rows; ++i) {
      if (feasible.u[i] < 0) return false;
    }
    return true;
  }

  // After survey(). Equal entries are taken together, so that what is symmetric stays so.
  void first_candidates(double depth) {
    const Duals least_of = feasible, mean_of = partner;
    for (int64_t i = 0; i < rows; ++i) limit.u[i] = least_of.u[i] + depth * max(mean_of.u[i] - least_of.u[i], 0);
    for (int64_t j = 0; j < pitch; ++j) limit.v[j] = least_of.v[j] + depth * max(mean_of.v[j] - least_of.v[j], 0);
    candidates = 0;
    for (int64_t i = 0; i < rows; ++i) {
      read_row(i);
      begin_row(i);
      const Vec ui = splat(point.u[i]), limit_i = splat(limit.u[i]);
      for (int64_t j = 0; j < pitch; j += LANES) {
        const Vec gradient = load(row + j) - load(point.v + j) - ui, highest = max(load(limit.v + j), limit_i);
        if (!any_below(gradient, Vec{}) || !any_sign((Vec)(gradient <= highest))) continue;
        for (int lane = 0; lane < LANES; ++lane) {
          if (gradient[lane] < 0 && gradient[lane] <= highest[lane]) append(i, (int32_t)(j + lane), row[j + lane]);
        }
      }
      end_row(i);
    }
  }

  void all_candidates() {
    for (int64_t i = 0; i < rows; ++i) {
      read_row(i);
      begin_row(i);
      for (int64_t j = 0; j < columns; ++j) {
        if (row[j] < INFINITE) append(i, (int32_t)j, row[j]);  // else forbidden: stays 0
      }
      end_row(i);
    }
  }

  void begin_row(int64_t i) {
    first[i] = candidates;
    count[i] = 0;
  }

  void append(int64_t i, int32_t j, double c) {
    const int64_t at = first[i] + count[i]++;
    column[at] = j;
    cost[at] = c;
    plan.entries[at] = previous.entries[at] = best.entries[at] = 0;
  }

  void end_row(int64_t i) {
    pad(i);
    candidates = end_of(i);
  }

  int64_t end_of(int64_t i) const { return first[i] + (count[i] + GROUP - 1) / GROUP * GROUP; }

  void pad(int64_t i) const {
    for (int64_t k = first[i] + count[i]; k < end_of(i); ++k) {
      column[k] = (int32_t)columns;
      cost[k] = INFINITE;
      plan.entries[k] = previous.entries[k] = best.entries[k] = 0;
    }
  }

  void move(int64_t from, int64_t to) const {
    column[to] = column[from];
    cost[to] = cost[from];
    plan.entries[to] = plan.entries[from];
    previous.entries[to] = previous.entries[from];
    best.entries[to] = best.entries[from];
  }

  // Drops the candidates that are 0 and have a positive gradient at the plan.
  void drop_idle() {
    candidates = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t from = first[i], end = from + count[i];
      begin_row(i);
      for (int64_t k = from; k < end; ++k) {
        const bool zero = plan.entries[k] + previous.entries[k] + best.entries[k] == 0;
        if (!zero || cost[k] - at_plan.v[column[k]] <= at_plan.u[i]) move(k, first[i] + count[i]++);
      }
      end_row(i);
    }
  }

  // Adds the columns that look_at_all() found, the last row first, so that none is overwritten.
  void add_found() {
    const int32_t* list = (const int32_t*)trial.entries;
    int64_t end = 0;
    for (int64_t i = 0; i < rows; ++i) {
      end += (count[i] + found[i] + GROUP - 1) / GROUP * GROUP;
      list += found[i];
    }
    candidates = end;
    for (int64_t i = rows - 1; i >= 0; --i) {
      int64_t old = first[i] + count[i] - 1, more = found[i] - 1;
      const int64_t oldest = first[i];
      list -= found[i];
      count[i] += found[i];
      first[i] = end - (count[i] + GROUP - 1) / GROUP * GROUP;
      for (int64_t to = first[i] + count[i] - 1; to >= first[i]; --to) {
        if (more < 0 || (old >= oldest && column[old] > list[more])) {
          move(old--, to);
        } else {
          const int32_t j = list[more--];
          column[to] = j;
          read(cost + to, problem.cost.data, problem.cost.dtype, problem.cost_start + i * columns + j, 1);
          plan.entries[to] = previous.entries[to] = best.entries[to] = 0;
        }
      }
      pad(i);
      end = first[i];
    }
  }

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

  // `feasible` at the plan over all entries. Leaves the candidates to come in the trial plan's memory: the gradient at
  // the plan is below 0, and at least DEPTH of its least in the row.
  void look_at_all() const {
    duals_at_plan();
    const Duals at = at_plan, out = feasible;
    int32_t* list = (int32_t*)trial.entries;
    for (int64_t j = 0; j < pitch; ++j) out.v[j] = tau_b * b[j];
    for (int64_t i = 0; i < rows; ++i) {
      read_row(i);
      const double low = largest_feasible_of_row(at, i, out.v);
      out.u[i] = min(tau_a * a[i], low);
      found[i] = 0;
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
          list[found[i]++] = entry;
        }
      }
      list += found[i];
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
  if (gap > 0) {
    if (problem.accelerated) {
      goal = max(FIRST_GOAL, problem.tol);
      double depth = FIRST_DEPTH;
      solver.first_candidates(depth);
      while (solver.candidates > FIRST_SHARE * (rows + columns) && depth > 0.01) solver.first_candidates(depth /= 2);
    } else {
      solver.all_candidates();
    }
  }
  double best_value = solver.penalties(solver.best), best_size = best_value, best_bound = -INFINITE;
  const auto gap_to = [&](double bound) {
    return max((best_value - bound) / max(best_size, 2.2250738585072014e-308), 0.0);
  };
  for (int64_t iteration = 1; iteration <= problem.max_iterations && gap > problem.tol; ++iteration) {
    if (problem.accelerated) {
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
    }
    if (problem.accelerated && !last && gap_to(solver.bound_of_candidates()) > goal) continue;

    solution->iterations = iteration;
    solver.look_at_all();
    best_bound = max(solver.whole_bound(), best_bound);
    gap = gap_to(best_bound);
    if (problem.accelerated && gap > problem.tol) {
      if (gap < gap_at_drop / 2) {  // so that none can come and go for ever
        solver.drop_idle();
        gap_at_drop = gap;
      }
      solver.add_found();
      goal = max(gap * GOAL_FACTOR, problem.tol);
    }
  }

  solver.write_plan(*solution);
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

// The algorithm is that of fedkernels/reference/unbalanced_ot.py, step for step. What is different is the work of a step:
// the quadratic sees the plan only through its row and column sums, so one pass over the entries takes the step and sums
// all that the line search, the restart and the next gradient need. And from some tens of steps on nearly all of the
// plan is 0: a block of columns in which it was 0 and the gradient is positive is not written, and not even read where
// the gradient was so large at the last look that u and v cannot have made up for it since.
#include "cpu/unbalanced_ot.h"

#include "cpu/simd.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int64_t BLOCK = TRANSPORT_BLOCK;
constexpr int VECS = BLOCK / LANES;
constexpr int64_t CHECK_EVERY = 10;  // as in the reference
const double INFINITE = __builtin_inf();

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

struct Plan {
  double* entries;  // [rows, pitch]
  double* row_sums;
  double* column_sums;
  char* live;  // of each block: may it hold a positive entry? Where not, all of it is 0.
};

struct Solver {
  const TransportProblem& problem;
  int64_t rows, pitch, blocks;  // blocks of a row
  double tau_a, tau_b;
  double *cost, *a, *b;
  Plan plan, previous, trial, best;
  double *u, *v;                      // at the point that the gradient is taken at
  double *row_bound, *column_bound;   // scratch of the certificate
  double *row_bound2, *column_bound2;
  double *row_room, *column_room;
  double* room;   // of each block: a lower bound on min(cost - v) + drift
  double* drift;  // of each column of blocks: by how much v has risen in all

  ParallelFor parallel_for;
  int64_t bands;
  double* of_bands[TRANSPORT_BANDS];  // [pitch] each: a band's part of what is reduced over the rows
  Vec squares_of[TRANSPORT_BANDS], advances_of[TRANSPORT_BANDS];

  Solver(const TransportProblem& problem, ParallelFor parallel_for, double* workspace)
      : problem(problem), parallel_for(parallel_for), bands(transport_bands(problem.rows, problem.columns)) {
    rows = problem.rows;
    pitch = transport_pitch(problem.columns);
    blocks = pitch / BLOCK;
    tau_a = problem.tau_a;
    tau_b = problem.tau_b;
    const int64_t padded = transport_pitch(rows);
    const auto take = [&workspace](int64_t count) {
      double* start = workspace;
      workspace += count;
      return start;
    };
    cost = take(rows * pitch);
    double** const of_rows[] = {&a, &u, &row_bound, &row_bound2, &row_room};
    for (double** array : of_rows) *array = take(padded);
    double** const of_columns[] = {&b, &v, &column_bound, &column_bound2, &column_room, &drift};
    for (double** array : of_columns) *array = take(pitch);
    Plan* const plans[] = {&plan, &previous, &trial, &best};
    for (Plan* each : plans) {
      each->entries = take(rows * pitch);
      each->row_sums = take(padded);
      each->column_sums = take(pitch);
      const int64_t flags = transport_pitch(rows * blocks / 8 + 1);
      each->live = (char*)take(flags);
      __builtin_memset(each->entries, 0, rows * pitch * 8);
      __builtin_memset(each->row_sums, 0, padded * 8);
      __builtin_memset(each->column_sums, 0, pitch * 8);
      __builtin_memset(each->live, 0, flags * 8);
    }
    for (double*& array : of_bands) array = take(pitch);
    room = take(transport_pitch(rows * blocks));
    for (int64_t block = 0; block < rows * blocks; ++block) room[block] = -INFINITE;
    for (int64_t j = 0; j < pitch; ++j) v[j] = drift[j] = 0;
    for (int64_t i = 0; i < rows; ++i) {
      read(cost + i * pitch, problem.cost.data, problem.cost.dtype, problem.cost_start + i * problem.columns,
           problem.columns);
      for (int64_t j = problem.columns; j < pitch; ++j) cost[i * pitch + j] = INFINITE;  // forbidden: stays 0
    }
    read(a, problem.a.data, problem.a.dtype, problem.a_start, rows);
    read(b, problem.b.data, problem.b.dtype, problem.b_start, problem.columns);
    for (int64_t j = problem.columns; j < pitch; ++j) b[j] = 0;
  }

  // body(band, first row, end) for each band of rows.
  template <typename Body>
  void for_bands(const Body& body) const {
    if (bands == 1) return body(0, 0, rows);
    struct Call {
      const Body& body;
      int64_t rows, bands;
    } call = {body, rows, bands};
    parallel_for(
        bands,
        [](int64_t band, void* context) {
          const Call& call = *(const Call*)context;
          call.body(band, call.rows * band / call.bands, call.rows * (band + 1) / call.bands);
        },
        &call);
  }

  // NaN, a cost of -inf (no minimum) or an infinite mass.
  bool hopeless() const {
    for (int64_t i = 0; i < rows * pitch; ++i) {
      if (!(cost[i] > -INFINITE)) return true;
    }
    for (int64_t i = 0; i < rows; ++i) {
      if (!(__builtin_fabs(a[i]) < INFINITE)) return true;
    }
    for (int64_t j = 0; j < pitch; ++j) {
      if (!(__builtin_fabs(b[j]) < INFINITE)) return true;
    }
    return false;
  }

  // Where no entry has a negative gradient at plan = 0, plan = 0 is optimal.
  bool nothing_pays() const {
    for (int64_t i = 0; i < rows; ++i) {
      const double price = tau_a * a[i];
      for (int64_t j = 0; j < pitch; ++j) {
        if (price + tau_b * b[j] - cost[i * pitch + j] > 0) return false;
      }
    }
    return true;
  }

  double penalties(const Plan& at) const {
    double of_rows = 0, of_columns = 0;
    for (int64_t i = 0; i < rows; ++i) of_rows += square(at.row_sums[i] - a[i]);
    for (int64_t j = 0; j < pitch; ++j) of_columns += square(at.column_sums[j] - b[j]);
    return tau_a / 2 * of_rows + tau_b / 2 * of_columns;
  }

  // <cost, plan> and <|cost|, plan>; a forbidden entry costs 0.
  void linear(const Plan& at, double* signed_part, double* size_part) const {
    double total = 0, size = 0;
    for (int64_t block = 0; block < rows * blocks; ++block) {
      if (!at.live[block]) continue;
      Vec part{}, absolute{};
      for (int k = 0; k < VECS; ++k) {
        const int64_t at_entry = block * BLOCK + k * LANES;
        const Vec c = load(cost + at_entry), x = load(at.entries + at_entry);
        const Vec product = x > 0 ? c * x : Vec{};
        part += product;
        absolute += product < 0 ? -product : product;
      }
      total += sum(part);
      size += sum(absolute);
    }
    *signed_part = total;
    *size_part = size;
  }

  double dual_value(const double* at_u, const double* at_v) const {
    double of_rows = 0, of_columns = 0;
    for (int64_t i = 0; i < rows; ++i) of_rows += a[i] * at_u[i] - square(at_u[i]) / (2 * tau_a);
    for (int64_t j = 0; j < pitch; ++j) of_columns += b[j] * at_v[j] - square(at_v[j]) / (2 * tau_b);
    return of_rows + of_columns;
  }

  // row_room_i = min_j(cost_ij - at_v_j) and column_room_j = min_i(cost_ij - at_u_i), at most tau_a a_i and tau_b b_j.
  void largest_feasible(const double* at_u, const double* at_v, double* of_rows, double* of_columns) const {
    for_bands([&](int64_t band, int64_t first, int64_t end) {
      double* const lowest = of_bands[band];
      for (int64_t j = 0; j < pitch; ++j) lowest[j] = tau_b * b[j];
      for (int64_t i = first; i < end; ++i) {
        const double* c = cost + i * pitch;
        const Vec ui = splat(at_u[i]);
        Vec low0 = splat(INFINITE), low1 = low0;
        for (int64_t j = 0; j < pitch; j += 2 * LANES) {
          const Vec c0 = load(c + j), c1 = load(c + j + LANES);
          low0 = min(c0 - load(at_v + j), low0);
          low1 = min(c1 - load(at_v + j + LANES), low1);
          store(lowest + j, min(c0 - ui, load(lowest + j)));
          store(lowest + j + LANES, min(c1 - ui, load(lowest + j + LANES)));
        }
        of_rows[i] = min(tau_a * a[i], least(min(low0, low1)));
      }
    });
    __builtin_memcpy(of_columns, of_bands[0], pitch * 8);
    for (int64_t band = 1; band < bands; ++band) {
      for (int64_t j = 0; j < pitch; ++j) of_columns[j] = min(of_bands[band][j], of_columns[j]);
    }
  }

  // A lower bound on the optimum: the dual value of the plan's u and v, made feasible by shrinking either first.
  double bound(const Plan& at) {
    for (int64_t i = 0; i < rows; ++i) row_bound[i] = tau_a * (a[i] - at.row_sums[i]);
    for (int64_t j = 0; j < pitch; ++j) column_bound[j] = tau_b * (b[j] - at.column_sums[j]);
    largest_feasible(row_bound, column_bound, row_room, column_room);
    // row_room is the best u for v, column_room the best v for u: each is completed by the best partner.
    largest_feasible(row_room, column_room, row_bound2, column_bound2);
    return max(dual_value(row_room, column_bound2), dual_value(row_bound2, column_room));
  }

  void copy(const Plan& from, Plan& to) const {
    for (int64_t block = 0; block < rows * blocks; ++block) {
      if (from.live[block]) {
        __builtin_memcpy(to.entries + block * BLOCK, from.entries + block * BLOCK, BLOCK * 8);
      } else if (to.live[block]) {
        __builtin_memset(to.entries + block * BLOCK, 0, BLOCK * 8);
      }
      to.live[block] = from.live[block];
    }
    __builtin_memcpy(to.row_sums, from.row_sums, rows * 8);
    __builtin_memcpy(to.column_sums, from.column_sums, pitch * 8);
  }

  // tau_a |move 1|^2 + tau_b |move' 1|^2 of the move from the point plan + weight (plan - previous) to the trial.
  double curvature_of_move(double weight) const {
    double of_rows = 0, of_columns = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const double point = plan.row_sums[i] + weight * (plan.row_sums[i] - previous.row_sums[i]);
      of_rows += square(trial.row_sums[i] - point);
    }
    for (int64_t j = 0; j < pitch; ++j) {
      const double point = plan.column_sums[j] + weight * (plan.column_sums[j] - previous.column_sums[j]);
      of_columns += square(trial.column_sums[j] - point);
    }
    return tau_a * of_rows + tau_b * of_columns;
  }

  void duals_at_point(double weight) {
    for (int64_t i = 0; i < rows; ++i) {
      u[i] = tau_a * (a[i] - plan.row_sums[i] - weight * (plan.row_sums[i] - previous.row_sums[i]));
    }
    for (int64_t block = 0; block < blocks; ++block) {
      double rise = 0;
      for (int64_t j = block * BLOCK; j < (block + 1) * BLOCK; ++j) {
        const double next =
            tau_b * (b[j] - plan.column_sums[j] - weight * (plan.column_sums[j] - previous.column_sums[j]));
        rise = max(next - v[j], rise);
        v[j] = next;
      }
      drift[block] += rise;
    }
  }

  // trial = max(0, point - step * gradient(point)), with its sums, |move|^2 and <move, trial - plan>.
  void step_rows(int64_t first, int64_t end, double weight, double step_length, int64_t band) {
    const Vec inertia = splat(weight), length = splat(step_length);
    double* const column_sums = of_bands[band];
    for (int64_t j = 0; j < pitch; ++j) column_sums[j] = 0;
    Vec squares{}, advances{};
    for (int64_t i = first; i < end; ++i) {
      const Vec ui = splat(u[i]);
      Vec row_sum{};
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t flag = i * blocks + block, start = flag * BLOCK, column = block * BLOCK;
        const bool live = plan.live[flag] | previous.live[flag];
        bool idle = !live && room[flag] - drift[block] > u[i];
        Vec gradient[VECS];
        if (!idle) {
          Vec lowest = splat(INFINITE);
          for (int k = 0; k < VECS; ++k) {
            gradient[k] = load(cost + start + k * LANES) - load(v + column + k * LANES);
            lowest = min(gradient[k], lowest);
            gradient[k] -= ui;
          }
          if (!live) {
            const double low = least(lowest);
            room[flag] = low + drift[block];
            idle = low >= u[i];
          }
        }
        if (idle) {
          if (trial.live[flag]) {
            __builtin_memset(trial.entries + start, 0, BLOCK * 8);
            trial.live[flag] = 0;
          }
          continue;
        }
        Vec block_sum{};
        for (int k = 0; k < VECS; ++k) {
          const Vec x = load(plan.entries + start + k * LANES), before = load(previous.entries + start + k * LANES);
          const Vec point = x + inertia * (x - before);
          const Vec next = max(point - length * gradient[k], Vec{});
          const Vec move = next - point;
          squares += move * move;
          advances += move * (next - x);
          block_sum += next;
          store(trial.entries + start + k * LANES, next);
          double* sums = column_sums + column + k * LANES;
          store(sums, load(sums) + next);
        }
        trial.live[flag] = any_sign(Vec{} - block_sum);
        row_sum += block_sum;
      }
      trial.row_sums[i] = sum(row_sum);
    }
    squares_of[band] = squares;
    advances_of[band] = advances;
  }

  void step(double weight, double step_length, double* move_square, double* move_advance) {
    for_bands([&](int64_t band, int64_t first, int64_t end) { step_rows(first, end, weight, step_length, band); });
    __builtin_memcpy(trial.column_sums, of_bands[0], pitch * 8);
    Vec squares = squares_of[0], advances = advances_of[0];
    for (int64_t band = 1; band < bands; ++band) {
      for (int64_t j = 0; j < pitch; ++j) trial.column_sums[j] += of_bands[band][j];
      squares += squares_of[band];
      advances += advances_of[band];
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
    for (int64_t j = 0; j < pitch; ++j) trial.column_sums[j] = 0;
    double squares = 0, of_rows = 0, of_columns = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double row_sum = 0;
      for (int64_t j = 0; j < pitch; ++j) {
        const double c = cost[i * pitch + j];
        const double gradient = c < INFINITE ? c - u[i] - v[j] : 0;
        squares += gradient * gradient;
        row_sum += gradient;
        trial.column_sums[j] += gradient;
      }
      of_rows += square(row_sum);
    }
    for (int64_t j = 0; j < pitch; ++j) of_columns += square(trial.column_sums[j]);
    const double along = tau_a * of_rows + tau_b * of_columns;
    const double limit = tau_a * problem.columns + tau_b * rows;  // the largest eigenvalue
    const double length = shorten * (along > 1e-6 * limit * squares ? squares / along : 1 / limit);

    for (int64_t j = 0; j < pitch; ++j) trial.column_sums[j] = 0;
    double slope = 0;
    for (int64_t i = 0; i < rows; ++i) {
      double row_sum = 0;
      for (int64_t j = 0; j < pitch; ++j) {
        const int64_t entry = i * pitch + j;
        const double gradient = cost[entry] < INFINITE ? cost[entry] - u[i] - v[j] : 0;
        const double next = max(plan.entries[entry] - length * gradient, 0.0);
        slope += gradient * (next - plan.entries[entry]);
        trial.entries[entry] = next;
        trial.column_sums[j] += next;
        row_sum += next;
      }
      trial.row_sums[i] = row_sum;
    }
    if (slope + curvature_of_move(0) / 2 <= 1e-4 * slope) {
      __builtin_memset(trial.live, 1, rows * blocks);
      rotate();
      shorten = 1;
    } else {
      shorten /= 2;
    }
  }
};

}  // namespace

void unbalanced_ot(const TransportProblem& problem, ParallelFor parallel_for, double* workspace,
                   TransportSolution* solution) {
  Solver solver(problem, parallel_for, workspace);
  const int64_t rows = solver.rows, columns = problem.columns;
  solution->iterations = 0;
  if (solver.hopeless()) {
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

  double best_value = solver.penalties(solver.best), best_size = best_value, best_bound = -INFINITE;
  double gap = solver.nothing_pays() ? 0 : INFINITE;
  for (int64_t iteration = 1; iteration <= problem.max_iterations && gap > problem.tol; ++iteration) {
    if (problem.accelerated) {
      solver.accelerated_step();
    } else {
      solver.steepest_step();
    }
    if (iteration % CHECK_EVERY && iteration != problem.max_iterations) continue;
    double linear, size;
    solver.linear(solver.plan, &linear, &size);
    const double penalties = solver.penalties(solver.plan);
    if (linear + penalties < best_value) {
      best_value = linear + penalties;
      best_size = size + penalties;
      solver.copy(solver.plan, solver.best);
    }
    best_bound = max(solver.bound(solver.plan), best_bound);
    gap = max((best_value - best_bound) / max(best_size, 2.2250738585072014e-308), 0.0);
    solution->iterations = iteration;
  }

  double mass = 0;
  for (int64_t i = 0; i < rows; ++i) {
    write(solution->plan.data, solution->plan.dtype, solution->plan_start + i * columns,
          solver.best.entries + i * solver.pitch, columns);
    solution->u[i] = solver.tau_a * (solver.a[i] - solver.best.row_sums[i]);
    mass += solver.best.row_sums[i];
  }
  for (int64_t j = 0; j < columns; ++j) solution->v[j] = solver.tau_b * (solver.b[j] - solver.best.column_sums[j]);
  solution->value = best_value;
  solution->gap = gap;
  solution->mass = mass;
}

}  // namespace fedkernels::FEDKERNELS_ISA

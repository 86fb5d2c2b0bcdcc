// The entries of the plan that the solver of unbalanced_ot.cpp takes steps on: lists of columns for each row, with
// their costs and four plans. All other entries of the plans are 0.
#pragma once

#include "cpu/simd.h"
#include "cpu/unbalanced_ot.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int64_t GROUP = TRANSPORT_GROUP;
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

struct Candidates {
  const TransportProblem& problem;
  int64_t rows, columns, row_pitch, pitch;
  double tau_a, tau_b;
  double *a, *b;
  double* row;  // of the cost, widened
  Duals point;  // at the point that the gradient is taken at
  Duals at_plan, feasible, partner, limit;  // of the certificate; the last three also choose the first candidates

  int64_t *first, *count;  // of each row's candidates
  int64_t* missing;          // of each row: how many candidates look_at_all() has listed to be added
  int64_t candidates = 0;  // with padding, which has cost = inf and the column `columns`
  int32_t* column;         // ascending in each row
  double* cost;
  Plan plan, previous, trial, best;

  Candidates(const TransportProblem& problem, double* workspace)
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
    int64_t** const of_rows[] = {&first, &count, &missing};
    for (int64_t** array : of_rows) *array = (int64_t*)take(row_pitch);
    Plan* const plans[] = {&plan, &previous, &trial, &best};
    for (Plan* each : plans) {
      each->row_sums = take(row_pitch);
      each->column_sums = take(pitch);
    }
    for (Plan* each : plans) each->entries = take(rows * pitch);
    cost = take(rows * pitch);
    column = (int32_t*)workspace;
    widen(a, problem.a, problem.a_start, rows);
    widen(b, problem.b, problem.b_start, columns);
    for (int64_t j = columns; j < pitch; ++j) row[j] = INFINITE;
  }

  void read_row(int64_t i) const {
    widen(row, problem.cost, problem.cost_start + i * columns, columns);
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

  // Adds the columns that look_at_all() listed, the last row first, so that none is overwritten.
  void add_missing() {
    const int32_t* list = (const int32_t*)trial.entries;
    int64_t end = 0;
    for (int64_t i = 0; i < rows; ++i) {
      end += (count[i] + missing[i] + GROUP - 1) / GROUP * GROUP;
      list += missing[i];
    }
    candidates = end;
    for (int64_t i = rows - 1; i >= 0; --i) {
      int64_t old = first[i] + count[i] - 1, more = missing[i] - 1;
      const int64_t oldest = first[i];
      list -= missing[i];
      count[i] += missing[i];
      first[i] = end - (count[i] + GROUP - 1) / GROUP * GROUP;
      for (int64_t to = first[i] + count[i] - 1; to >= first[i]; --to) {
        if (more < 0 || (old >= oldest && column[old] > list[more])) {
          move(old--, to);
        } else {
          const int32_t j = list[more--];
          column[to] = j;
          widen(cost + to, problem.cost, problem.cost_start + i * columns + j, 1);
          plan.entries[to] = previous.entries[to] = best.entries[to] = 0;
        }
      }
      pad(i);
      end = first[i];
    }
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA

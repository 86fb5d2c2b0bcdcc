// The interior-point method of fedkernels/reference/_transport_interior_point.py, where the formulas stand. It works on
// all entries: its systems have the size of the shorter side, whatever the number of positive entries is.
//
// The matrices are [shorter side, longer side], so the cost is transposed where it has more rows than columns. The
// longer side's duals are eliminated, and its masses and duals have the entries that the inner loops run over.
#pragma once

#include "cpu/dots.h"
#include "cpu/unbalanced_ot_candidates.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr double FRACTION = 0.995;      // of the way to the boundary that a step goes

struct InteriorPoint {
  struct Side {
    int64_t count, pitch;
    double tau;
    const double* masses = nullptr;  // padded with 0
    double *duals = nullptr, *step = nullptr, *right = nullptr;
    double* best = nullptr;  // the duals made as large as is feasible
    double *sums = nullptr, *offered_sums = nullptr;  // of the plan, and of the plan that value() is of
  };
  static constexpr int64_t VECTORS = 6;  // of a side, in one piece from `duals` on

  const TransportProblem& problem;
  const bool transposed;
  Side shorter, longer;
  double *cost, *plan, *weights, *scaled, *kept;  // [shorter, longer]
  double* factor;                                 // [shorter.pitch, shorter.pitch]: L sqrt(p), without its minus signs
  double *pivots, *excess;                        // [shorter]: sqrt(p), and the sums of the matrix's rows
  double *own, *root;                             // [longer]: 1 / tau + sums of the weights, and 1 / sqrt of it
  double entries = 0;                             // that are not forbidden

  // It touches the workspace in start() first.
  InteriorPoint(const TransportProblem& problem, const double* a, const double* b, double* workspace)
      : problem(problem), transposed(problem.rows > problem.columns) {
    const auto take = [&workspace](int64_t size) {
      double* start = workspace;
      workspace += size;
      return start;
    };
    shorter = {transposed ? problem.columns : problem.rows, 0, transposed ? problem.tau_b : problem.tau_a};
    longer = {transposed ? problem.rows : problem.columns, 0, transposed ? problem.tau_a : problem.tau_b};
    shorter.masses = transposed ? b : a;
    longer.masses = transposed ? a : b;
    shorter.pitch = interior_pitch(shorter.count);
    longer.pitch = transport_pitch(longer.count);
    Side* const sides[] = {&shorter, &longer};
    for (Side* side : sides) {
      double** const vectors[] = {&side->duals, &side->step,        &side->right, &side->best,
                                  &side->sums,  &side->offered_sums};
      for (double** vector : vectors) *vector = take(side->pitch);
    }
    pivots = take(shorter.pitch);
    excess = take(shorter.pitch);
    own = take(longer.pitch);
    root = take(longer.pitch);
    const int64_t size = shorter.count * longer.pitch;
    cost = take(size);
    plan = take(size);
    weights = take(size);
    scaled = take(rows_of_scaled() * longer.pitch);
    kept = take(size);
    factor = take(shorter.pitch * shorter.pitch);
  }

  int64_t rows_of_scaled() const { return (shorter.count + 3) / 4 * 4; }  // it is read in groups of four rows

  static void zeros(double* at, int64_t count) { __builtin_memset(at, 0, count * 8); }

  void read_cost() {
    for (int64_t k = 0; k < shorter.count * longer.pitch; ++k) cost[k] = INFINITE;
    for (int64_t i = 0; i < problem.rows; ++i) {
      double* row = transposed ? own : cost + i * longer.pitch;
      // `own` is as long as the longer side, and so at least as long as a row.
      widen(row, problem.cost, problem.cost_start + i * problem.columns, problem.columns);
      for (int64_t j = 0; j < problem.columns; ++j) {
        entries += row[j] < INFINITE;
        if (transposed) cost[j * longer.pitch + i] = row[j];
      }
    }
  }

  // The entries that the inner loops see at once: LANES of the longer side.
  Vec slack(int64_t j, int64_t i) const {
    return load(cost + j * longer.pitch + i) - splat(shorter.duals[j]) - load(longer.duals + i);
  }
  static Vec product_where_allowed(Vec x, Vec room) { return x > 0 ? x * room : Vec{}; }

  template <class Entry>  // the sum of entry(j, i) over all entries
  double total(const Entry& entry) const {
    Vec all{};
    for (int64_t j = 0; j < shorter.count; ++j) {
      for (int64_t i = 0; i < longer.pitch; i += LANES) all += entry(j, i);
    }
    return sum(all);
  }

  double mean_slack() const {
    return total([this](int64_t j, int64_t i) {
             const Vec room = slack(j, i);
             return room < INFINITE ? room : Vec{};
           }) / entries;
  }

  static double magnitude(const Side& side) {
    double all = 0;
    for (int64_t i = 0; i < side.count; ++i) all += __builtin_fabs(side.masses[i]);
    return all;
  }

  // From zero duals, which are made feasible. Those of a plan have the size of tau, and would round the slack away.
  void start() {
    zeros(shorter.duals, VECTORS * shorter.pitch);
    zeros(longer.duals, VECTORS * longer.pitch);
    zeros(scaled, rows_of_scaled() * longer.pitch);
    read_cost();
    largest_feasible();
    __builtin_memcpy(shorter.duals, shorter.best, shorter.count * 8);
    __builtin_memcpy(longer.duals, longer.best, longer.count * 8);
    const double masses_of_shorter = magnitude(shorter), masses_of_longer = magnitude(longer);
    double inward = mean_slack() / 2;
    if (!(inward > 0)) inward = shorter.tau * masses_of_shorter + longer.tau * masses_of_longer;
    for (int64_t j = 0; j < shorter.count; ++j) shorter.duals[j] -= inward;
    const double level = mean_slack();
    const double entry = (masses_of_shorter + masses_of_longer) / (2.0 * shorter.count * longer.count) +
                         level / (shorter.tau * longer.count + longer.tau * shorter.count);
    const Vec products = splat(level * entry);
    for (int64_t j = 0; j < shorter.count; ++j) {
      for (int64_t i = 0; i < longer.pitch; i += LANES) store(plan + j * longer.pitch + i, products / slack(j, i));
    }
  }

  // best <- the largest feasible duals, first the shorter side's for the longer side's, then the reverse.
  void largest_feasible() {
    for (int64_t i = 0; i < longer.pitch; ++i) longer.best[i] = longer.tau * longer.masses[i];
    for (int64_t j = 0; j < shorter.count; ++j) {
      const double* row = cost + j * longer.pitch;
      Vec low = splat(shorter.tau * shorter.masses[j]);
      for (int64_t i = 0; i < longer.pitch; i += LANES) low = min(load(row + i) - load(longer.duals + i), low);
      shorter.best[j] = least(low);
      const Vec dual = splat(shorter.best[j]);
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        store(longer.best + i, min(load(row + i) - dual, load(longer.best + i)));
      }
    }
  }

  // A lower bound on the optimum, by the largest feasible duals.
  double bound() {
    largest_feasible();
    return dual_part(shorter.masses, shorter.best, shorter.tau, transport_pitch(shorter.count)) +
           dual_part(longer.masses, longer.best, longer.tau, longer.pitch);
  }

  // False where rounding has made a number unusable.
  bool step() {
    const double mu = total([this](int64_t j, int64_t i) {
                        return product_where_allowed(load(plan + j * longer.pitch + i), slack(j, i));
                      }) / entries;
    factorise();

    // The predictor aims at mu = 0.
    const auto predicted = [this](int64_t j, int64_t i) { return -load(plan + j * longer.pitch + i); };
    direction(predicted);
    const Vec reach_of_predictor = splat(reach(predicted));
    const double ahead = total([&](int64_t j, int64_t i) {
                           const Vec x = load(plan + j * longer.pitch + i);
                           const Vec next = x + reach_of_predictor * plan_step(predicted, j, i);
                           const Vec room = slack(j, i) + reach_of_predictor * slack_step(j, i);
                           return x > 0 ? next * room : Vec{};
                         }) / entries;
    const double ratio = ahead / mu;
    const Vec centre = splat(ratio * ratio * ratio * mu);

    // The corrector needs the predictor's step, which the next direction would overwrite.
    for (int64_t j = 0; j < shorter.count; ++j) {
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec second_order = plan_step(predicted, j, i) * slack_step(j, i);
        store(scaled + j * longer.pitch + i, (centre - second_order) / slack(j, i) - load(plan + j * longer.pitch + i));
      }
    }
    const auto corrected = [this](int64_t j, int64_t i) { return load(scaled + j * longer.pitch + i); };
    direction(corrected);
    const double length = FRACTION * reach(corrected);
    if (!(length > 0) || !(mu > 0)) return false;
    for (int64_t j = 0; j < shorter.count; ++j) {
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        double* const at = plan + j * longer.pitch + i;
        store(at, load(at) + splat(length) * plan_step(corrected, j, i));
      }
    }
    for (int64_t j = 0; j < shorter.count; ++j) shorter.duals[j] += length * shorter.step[j];
    for (int64_t i = 0; i < longer.pitch; ++i) longer.duals[i] += length * longer.step[i];
    return true;
  }

  Vec slack_step(int64_t j, int64_t i) const { return -splat(shorter.step[j]) - load(longer.step + i); }

  // `target` is the step in the plan where the slack does not move.
  template <class Target>
  Vec plan_step(const Target& target, int64_t j, int64_t i) const {
    return target(j, i) - load(weights + j * longer.pitch + i) * slack_step(j, i);
  }

  // The longest step up to 1 at which plan and slack are not negative.
  template <class Target>
  double reach(const Target& target) const {
    Vec longest = splat(1);
    for (int64_t j = 0; j < shorter.count; ++j) {
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec x = load(plan + j * longer.pitch + i), move = plan_step(target, j, i), closing = slack_step(j, i);
        longest = move < 0 ? min(x / -move, longest) : longest;
        longest = closing < 0 ? min(slack(j, i) / -closing, longest) : longest;
      }
    }
    return least(longest);
  }

  // Newton's step in the duals.
  template <class Target>
  void direction(const Target& target) {
    for (int64_t i = 0; i < longer.pitch; ++i) {
      longer.right[i] = longer.masses[i] - longer.sums[i] - longer.duals[i] / longer.tau;
    }
    for (int64_t j = 0; j < shorter.count; ++j) {
      Vec total_of_row{};
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec entry = target(j, i);
        total_of_row += entry;
        store(longer.right + i, load(longer.right + i) - entry);
      }
      shorter.right[j] = shorter.masses[j] - shorter.sums[j] - shorter.duals[j] / shorter.tau - sum(total_of_row);
    }
    for (int64_t i = 0; i < longer.pitch; i += LANES) store(longer.step + i, load(longer.right + i) / load(own + i));
    for (int64_t j = 0; j < shorter.count; ++j) {
      Vec eliminated{};
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        eliminated += load(weights + j * longer.pitch + i) * load(longer.step + i);
      }
      shorter.step[j] = shorter.right[j] - sum(eliminated);
    }
    substitute();
    for (int64_t j = 0; j < shorter.count; ++j) {
      const Vec dual = splat(shorter.step[j]);
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec share = load(weights + j * longer.pitch + i) * dual / load(own + i);
        store(longer.step + i, load(longer.step + i) - share);
      }
    }
  }

  // The weights, the sums of the plan, and the factor of the system in the shorter side's duals.
  void factorise() {
    const double excess_of_longer = 1 / longer.tau;
    for (int64_t i = 0; i < longer.pitch; ++i) {
      own[i] = excess_of_longer;
      longer.sums[i] = 0;
    }
    for (int64_t j = 0; j < shorter.count; ++j) {
      Vec sum_of_row{};
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec x = load(plan + j * longer.pitch + i), weight = x / slack(j, i);
        store(weights + j * longer.pitch + i, weight);
        store(own + i, load(own + i) + weight);
        store(longer.sums + i, load(longer.sums + i) + x);
        sum_of_row += x;
      }
      shorter.sums[j] = sum(sum_of_row);
    }
    for (int64_t i = 0; i < longer.pitch; ++i) root[i] = 1 / __builtin_sqrt(own[i]);
    for (int64_t j = 0; j < shorter.count; ++j) {
      Vec left{};
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec each = load(root + i), entry = load(weights + j * longer.pitch + i) * each;
        store(scaled + j * longer.pitch + i, entry);
        left += entry * each;
      }
      excess[j] = 1 / shorter.tau + excess_of_longer * sum(left);
    }
    zeros(factor, shorter.pitch * shorter.pitch);
    for (int64_t j = 0; j < shorter.count; j += 4) {
      for (int64_t k = 0; k <= j; k += 4) {
        dots(scaled + j * longer.pitch, longer.pitch, scaled + k * longer.pitch, longer.pitch, longer.pitch, 1,
             factor + j * shorter.pitch + k, shorter.pitch);
      }
    }
    eliminate();
  }

  // Nothing is subtracted: see the reference.
  void eliminate() {
    const int64_t count = shorter.count, pitch = shorter.pitch, padded = (count + 3) / 4 * 4;
    for (int64_t first = 0; first < count; first += INTERIOR_BLOCK) {
      const int64_t last = first + INTERIOR_BLOCK < count ? first + INTERIOR_BLOCK : count;
      for (int64_t i = first; i < padded; i += 4) {  // what the finished columns add to this block of columns
        for (int64_t j = first; j < last && j <= i; j += 4) {
          dots(factor + i * pitch, pitch, factor + j * pitch, pitch, first, 1, factor + i * pitch + j, pitch);
        }
      }
      for (int64_t j = first; j < last; ++j) {
        const double* row = factor + j * pitch;
        double pivot = excess[j];
        for (int64_t i = j + 1; i < count; ++i) {
          double* const below = factor + i * pitch;
          for (int64_t k = first; k < j; ++k) below[j] += below[k] * row[k];
          pivot += below[j];
        }
        pivots[j] = __builtin_sqrt(pivot);
        const double inverse = 1 / pivots[j], share = excess[j] / pivot;
        for (int64_t i = j + 1; i < count; ++i) {
          double& entry = factor[i * pitch + j];
          // fault: entry * share; -> 0;
          excess[i] += entry * share;
          entry *= inverse;
        }
      }
    }
  }

  // shorter.step <- the solution of the system for it.
  void substitute() {
    double* x = shorter.step;
    for (int64_t i = 0; i < shorter.count; ++i) {
      const double* row = factor + i * shorter.pitch;
      double value = x[i];
      for (int64_t k = 0; k < i; ++k) value += row[k] * x[k];
      x[i] = value / pivots[i];
    }
    for (int64_t i = shorter.count - 1; i >= 0; --i) {
      const double* row = factor + i * shorter.pitch;
      const double value = x[i] /= pivots[i];
      for (int64_t k = 0; k < i; ++k) x[k] += row[k] * value;
    }
  }

  struct Value {
    double value, size;  // the objective, and <|cost|, plan> + the penalties
  };

  // Sets the threshold of entry() and the sums of the plan, sparse or as it is. Needs plan and duals of now.
  Value value(bool sparse) {
    threshold = sparse ? mean_plan() / mean_slack() : 0;
    for (int64_t i = 0; i < longer.pitch; ++i) longer.offered_sums[i] = 0;
    Vec linear{}, size{};
    for (int64_t j = 0; j < shorter.count; ++j) {
      Vec sum_of_row{};
      for (int64_t i = 0; i < longer.pitch; i += LANES) {
        const Vec x = entry(j, i), product = x > 0 ? load(cost + j * longer.pitch + i) * x : Vec{};
        linear += product;
        size += product < 0 ? -product : product;
        sum_of_row += x;
        store(longer.offered_sums + i, load(longer.offered_sums + i) + x);
      }
      shorter.offered_sums[j] = sum(sum_of_row);
    }
    const double penalties =
        shorter.tau / 2 * sum_of_squares(shorter.offered_sums, shorter.masses, transport_pitch(shorter.count)) +
        longer.tau / 2 * sum_of_squares(longer.offered_sums, longer.masses, longer.pitch);
    return {sum(linear) + penalties, sum(size) + penalties};
  }

  // The plan with exact zeros where it is small beside its slack: there it goes to 0, elsewhere the slack does.
  double threshold = 0;
  Vec entry(int64_t j, int64_t i) const {
    const Vec x = load(plan + j * longer.pitch + i);
    if (threshold == 0) return x;
    return x > splat(threshold) * slack(j, i) ? x : Vec{};
  }

  double mean_plan() const {
    return total([this](int64_t j, int64_t i) { return load(plan + j * longer.pitch + i); }) / entries;
  }

  // Keeps the plan whose value() was taken last, and writes its sums.
  void keep(double* row_sums, double* column_sums) {
    const Side &rows = transposed ? longer : shorter, &columns = transposed ? shorter : longer;
    __builtin_memcpy(row_sums, rows.offered_sums, rows.count * 8);
    __builtin_memcpy(column_sums, columns.offered_sums, columns.count * 8);
    for (int64_t j = 0; j < shorter.count; ++j) {
      for (int64_t i = 0; i < longer.pitch; i += LANES) store(kept + j * longer.pitch + i, entry(j, i));
    }
  }

  // Row i of the kept plan.
  void read_row(int64_t i, double* row) const {
    const int64_t columns = transposed ? shorter.count : longer.count;
    // fault: kept[j * longer.pitch + i] -> kept[i * longer.pitch + j]
    for (int64_t j = 0; j < columns; ++j) row[j] = transposed ? kept[j * longer.pitch + i] : kept[i * longer.pitch + j];
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA

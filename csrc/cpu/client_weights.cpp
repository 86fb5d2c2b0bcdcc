// The reference's problem as a linear complementarity problem, for which no step length or penalty need be chosen.
//
// If x >= 0 solves w = Ax - c >= 0, x'w = 0 with A = SGS, c = S1 and S = diag(G)^(-1/2), then Sx is a multiple of the
// argmin of p'Gp over the simplex, for the multiplier of 1'p = 1 only scales. Coordinate descent finds nearly all
// of the clients with x > 0, block principal pivoting (Judice and Pires 1994) the others: each of its steps is one
// Cholesky solve on the clients that it takes to be positive, and its end is exact up to rounding.
#include "cpu/client_weights.h"

#include "cpu/dots.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int64_t BLOCK = WEIGHTS_BLOCK;
constexpr int SWEEPS = 30;
constexpr double SINGULAR = 1e-11;   // a pivot of a matrix with unit diagonal
constexpr double TIE = 1e-9;         // of w_i / c_i: another client does as well as those with weight
constexpr double EPSILON = 2.220446049250313e-16;

inline double magnitude(double x) { return __builtin_fabs(x); }

struct Solver {
  int64_t clients, pitch;
  double *matrix, *factor;                     // [pitch, pitch]
  double *scale, *right, *x, *w, *solution, *product;  // [pitch]
  int64_t* chosen;                             // the clients taken to be positive, ascending
  char* positive;                              // the same as flags

  Solver(int64_t clients, double* workspace) : clients(clients), pitch(weights_pitch(clients)) {
    matrix = workspace;
    factor = matrix + pitch * pitch;
    scale = factor + pitch * pitch;
    right = scale + pitch;
    x = right + pitch;
    w = x + pitch;
    solution = w + pitch;
    product = solution + pitch;
    chosen = (int64_t*)(product + pitch);
    positive = (char*)(chosen + pitch);
  }

  // The checks of fedkernels/client_weights.py. The symmetric part of G goes to `matrix`.
  bool read_gram(const Array& gram, int64_t start) {
    double largest = 0;
    bool finite = true;
    for (int64_t i = 0; i < clients; ++i) {
      double* row = factor + i * pitch;
      widen(row, gram, start + i * clients, clients);
      for (int64_t j = 0; j < clients; ++j) {
        finite &= magnitude(row[j]) <= 1.7976931348623157e308;
        largest = magnitude(row[j]) > largest ? magnitude(row[j]) : largest;
      }
    }
    if (!finite) return false;
    const double slack = 1e-2 * largest;
    for (int64_t i = 0; i < clients; ++i) {
      const double diagonal = factor[i * pitch + i];
      if (diagonal < -slack) return false;
      product[i] = diagonal > 0 ? __builtin_sqrt(diagonal) : 0;
    }
    bool good = true;
    // Tiles, for one of the two entries lies in a column.
    for (int64_t top = 0; top < clients; top += BLOCK) {
      for (int64_t left = 0; left <= top; left += BLOCK) {
        for (int64_t i = top; i < top + BLOCK && i < clients; ++i) {
          for (int64_t j = left; j < left + BLOCK && j <= i; ++j) {
            const double one = factor[i * pitch + j], other = factor[j * pitch + i];
            const double limit = product[i] * product[j] + slack;
            good &= magnitude(one - other) <= slack && magnitude(one) <= limit && magnitude(other) <= limit;
            matrix[i * pitch + j] = matrix[j * pitch + i] = one / 2 + other / 2;
          }
        }
      }
    }
    return good;
  }

  // matrix <- SGS with S = diag(G)^(-1/2), right <- S1 up to a factor; false where a client did not move.
  bool normalise() {
    double least = __builtin_inf();
    for (int64_t i = 0; i < clients; ++i) {
      const double diagonal = matrix[i * pitch + i];
      if (!(diagonal > 0)) return false;
      scale[i] = 1 / __builtin_sqrt(diagonal);
      least = scale[i] < least ? scale[i] : least;
    }
    for (int64_t i = 0; i < clients; ++i) {
      double* row = matrix + i * pitch;
      for (int64_t j = 0; j < clients; ++j) row[j] *= scale[i] * scale[j];
      row[i] = 1;
      for (int64_t j = clients; j < pitch; ++j) row[j] = 0;
      right[i] = scale[i] / least;
    }
    for (int64_t i = clients; i < pitch; ++i) right[i] = 0;
    return true;
  }

  // x by cyclic coordinate descent on x'Ax/2 - c'x; `positive` is where it ends above 0.
  void descend() {
    for (int64_t i = 0; i < pitch; ++i) {
      x[i] = 0;
      w[i] = -right[i];
      positive[i] = 0;
    }
    int quiet = 0;
    for (int sweep = 0; sweep < SWEEPS && quiet < 3; ++sweep) {
      bool changed = false;
      for (int64_t i = 0; i < clients; ++i) {
        const double move = w[i] > x[i] ? -x[i] : -w[i];
        if (move == 0) continue;
        x[i] += move;
        const double* row = matrix + i * pitch;
        for (int64_t j = 0; j < pitch; ++j) w[j] += move * row[j];
        changed |= positive[i] != (x[i] > 0);
        positive[i] = x[i] > 0;
      }
      quiet = changed ? 0 : quiet + 1;
    }
  }

  // row <- row L^-T on its first `size` entries, with L' in `triangle`.
  static void eliminate(double* row, const double (*triangle)[BLOCK], int64_t size) {
    for (int64_t j = 0; j < size; ++j) {
      const double value = row[j] *= triangle[j][j];
      // fault: triangle[j][k] -> triangle[k][j]
      for (int64_t k = j + 1; k < size; ++k) row[k] -= value * triangle[j][k];
    }
  }

  // The lower Cholesky factor of A on the `count` chosen clients; false where it is singular.
  bool factorise(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double* row = matrix + chosen[i] * pitch;
      for (int64_t j = 0; j <= i; ++j) factor[i * pitch + j] = row[chosen[j]];
    }
    const int64_t padded = (count + 3) / 4 * 4;
    for (int64_t i = count; i < padded; ++i) {  // rows that only fill up a group of four
      for (int64_t j = 0; j < pitch; ++j) factor[i * pitch + j] = 0;
    }
    for (int64_t first = 0; first < count; first += BLOCK) {
      const int64_t last = first + BLOCK < count ? first + BLOCK : count;
      // What the finished columns take away from this block of columns.
      for (int64_t i = first; i < padded; i += 4) {
        for (int64_t j = first; j < last && j <= i; j += 4) {
          dots(factor + i * pitch, pitch, factor + j * pitch, pitch, first, -1, factor + i * pitch + j, pitch);
        }
      }
      // The block's own triangle, also transposed and with the pivots' inverses on its diagonal.
      double triangle[BLOCK][BLOCK];
      for (int64_t j = first; j < last; ++j) {
        double* row = factor + j * pitch;
        eliminate(row + first, triangle, j - first);
        double pivot = row[j];
        for (int64_t k = first; k < j; ++k) pivot -= row[k] * row[k];
        if (!(pivot > SINGULAR)) return false;
        row[j] = __builtin_sqrt(pivot);
        triangle[j - first][j - first] = 1 / row[j];
        for (int64_t k = first; k < j; ++k) triangle[k - first][j - first] = row[k];
      }
      // fault: i < count -> i + 1 < count
      for (int64_t i = last; i < count; ++i) eliminate(factor + i * pitch + first, triangle, last - first);
    }
    return true;
  }

  // solution <- A^-1 solution on the chosen clients.
  void substitute(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const double* row = factor + i * pitch;
      double value = solution[i];
      for (int64_t k = 0; k < i; ++k) value -= row[k] * solution[k];
      solution[i] = value / row[i];
    }
    for (int64_t i = count - 1; i >= 0; --i) {
      const double* row = factor + i * pitch;
      const double value = solution[i] /= row[i];
      for (int64_t k = 0; k < i; ++k) solution[k] -= value * row[k];
    }
  }

  // w <- Ax - c.
  void complement() {
    for (int64_t j = 0; j < pitch; ++j) w[j] = -right[j];
    for (int64_t i = 0; i < clients; ++i) {
      if (x[i] == 0) continue;
      const double* row = matrix + i * pitch;
      const double value = x[i];
      for (int64_t j = 0; j < pitch; ++j) w[j] += value * row[j];
    }
  }

  bool pivot() {
    int64_t fewest = clients + 1, chances = 3;
    for (int64_t round = 0; round < 3 * clients + 50; ++round) {
      int64_t count = 0;
      for (int64_t i = 0; i < clients; ++i) {
        x[i] = 0;
        if (positive[i]) chosen[count++] = i;
      }
      if (!factorise(count)) return false;
      // Once: with a unit diagonal no entry of |L| |L'| is above 1, so that the residual is rounding of sum(x) already.
      for (int64_t k = 0; k < count; ++k) solution[k] = right[chosen[k]];
      substitute(count);
      for (int64_t k = 0; k < count; ++k) x[chosen[k]] = solution[k];
      complement();

      int64_t wrong = 0, highest = 0;
      double largest = 0;
      for (int64_t i = 0; i < clients; ++i) largest = x[i] > largest ? x[i] : largest;
      const double below = -1e-14 * largest;
      for (int64_t i = 0; i < clients; ++i) {
        if (positive[i] ? x[i] < below : w[i] < -1e-12 * right[i]) {
          ++wrong;
          highest = i;
        }
      }
      if (wrong == 0) return true;
      if (wrong < fewest) {
        fewest = wrong;
        chances = 3;
      } else {
        --chances;
      }
      for (int64_t i = 0; i < clients; ++i) {
        // All that are wrong change sides; where that did not help, one does, which ends in time (Murty 1974).
        if ((chances >= 0 || i == highest) && (positive[i] ? x[i] < below : w[i] < -1e-12 * right[i])) {
          positive[i] = !positive[i];
        }
      }
    }
    return false;
  }

  // weights = Sx / sum; false where the optimum is not unique, or not reached to the tolerance.
  bool finish(double tol, double* weights) {
    double total = 0;
    for (int64_t i = 0; i < clients; ++i) {
      // fault: w[i] <= TIE * right[i] -> false
      if (!positive[i] && w[i] <= TIE * right[i]) return false;
      x[i] = x[i] > 0 ? x[i] : 0;
      total += x[i] * right[i];
    }
    if (!(total > 0)) return false;
    // In units of the trace: (Gp)_i = (Ax)_i / (s_i total) and so on, s being `right` up to a factor.
    complement();
    double trace = 0, mean = 0, value = 0, lowest = __builtin_inf(), shortest = __builtin_inf();
    for (int64_t i = 0; i < clients; ++i) {
      const double gradient = (w[i] + right[i]) / right[i] / total;
      const double length = 1 / (right[i] * right[i]);
      weights[i] = x[i] * right[i] / total;
      value += weights[i] * gradient;
      lowest = gradient < lowest ? gradient : lowest;
      trace += length;
      shortest = length < shortest ? length : shortest;
      solution[i] = 1 / right[i];
    }
    for (int64_t i = clients; i < pitch; ++i) solution[i] = 0;
    for (int64_t i = 0; i < clients; ++i) {
      Vec of_row{};
      for (int64_t j = 0; j < pitch; j += LANES) of_row += load(matrix + i * pitch + j) * load(solution + j);
      mean += sum(of_row) * solution[i];
    }
    mean /= (double)clients * clients;
    const double scale_of_optimum = mean < shortest ? mean : shortest;
    const double accept = (tol < 1e-10 ? tol : 1e-10) * scale_of_optimum;
    return value - lowest <= (accept > EPSILON * trace ? accept : EPSILON * trace);
  }
};

}  // namespace

void client_weights(const Array& gram, int64_t gram_start, int64_t clients, double tol, double* workspace,
                    double* weights) {
  Solver solver(clients, workspace);
  bool solved = solver.read_gram(gram, gram_start);
  if (solved) {
    double trace = 0;
    for (int64_t i = 0; i < clients; ++i) trace += solver.matrix[i * solver.pitch + i];
    if (clients == 1 || trace <= 0) {
      for (int64_t i = 0; i < clients; ++i) weights[i] = 1.0 / clients;
      return;
    }
    solved = solver.normalise();
  }
  if (solved) {
    solver.descend();
    solved = solver.pivot() && solver.finish(tol, weights);
  }
  if (!solved) {
    for (int64_t i = 0; i < clients; ++i) weights[i] = __builtin_nan("");
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA

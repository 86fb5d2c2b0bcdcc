// Debiased CKA: the unbiased HSIC of Song et al. 2007 takes the place of |y'x|^2.
//
// With n centered rows, a_i = |x_i|^2 and b_i = |y_i|^2 it is, but for the factor 1 / (n (n - 3)),
//
//     |y'x|^2 - n / (n - 2) sum_i a_i b_i + sum a sum b / ((n - 1) (n - 2))
//
// In sample space it is the inner product of the U-centered Gram matrices (Szekely and Rizzo 2014): the diagonal is 0, and
// A_ij = x_i'x_j + (a_i + a_j) / (n - 2) - sum a / ((n - 1) (n - 2)) for the others. Nothing cancels there.
#pragma once

#include "cpu/linear_cka_matrices.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

template <class T>
constexpr double ROUNDING = sizeof(T) == 8 ? 2.220446049250313e-16 : 1.1920928955078125e-7;
template <class T>
constexpr int64_t MOST_ROUNDED = sizeof(T) == 8 ? 94906265 : 4096;  // sqrt(2 / ROUNDING), as in the reference

// Block of the Gram matrix of representation p, from row i and column j on -> that of the U-centered one.
template <class T>
void u_center(const Matrices<T>& matrices, int64_t p, int64_t i, int64_t rows, int64_t j, int64_t columns, T* block,
              int64_t pitch) {
  const double n = (double)matrices.rows;
  const double* const norms = matrices.row_norms + p * matrices.rows;
  const double mean = matrices.traces[p] / (n - 1) / (n - 2);
  for (int64_t r = 0; r < rows; ++r) {
    T* const row = block + r * pitch;
    const double own = norms[i + r] / (n - 2) - mean;
    for (int64_t c = 0; c < columns; ++c) row[c] = (T)((double)row[c] + own + norms[j + c] / (n - 2));
    if (i == j) row[r] = 0;
  }
}

// sum_r a_r b_r of the squared norms of the rows.
template <class T>
double inner_of_norms(const Matrices<T>& matrices, int64_t i, int64_t j) {
  return inner(matrices.row_norms + i * matrices.rows, matrices.row_norms + j * matrices.rows, matrices.rows);
}

// n (n - 3) times the unbiased HSIC of two representations as they are scaled.
template <class T>
double hsic(const Matrices<T>& matrices, int64_t i, int64_t j, bool in_sample_space) {
  const double n = (double)matrices.rows, biased = matrices.inner[least(i, j) * matrices.count + (i < j ? j : i)];
  if (in_sample_space) return biased;  // it is not: U-centered already
  return biased - n / (n - 2) * inner_of_norms(matrices, i, j) +
         matrices.traces[i] / (n - 1) * matrices.traces[j] / (n - 2);
}

// The same of one with itself. What is not above the rounding of its products is that of a zero matrix.
template <class T>
double own_hsic(const Matrices<T>& matrices, int64_t i, bool in_sample_space) {
  const double value = hsic(matrices, i, i, in_sample_space);
  const double of_entries = 16 * ROUNDING<T> * matrices.traces[i];
  const double of_sums = (double)(16 + least(matrices.rows, MOST_ROUNDED<T>)) * ROUNDING<T>;
  return value <= (in_sample_space ? of_entries * of_entries : of_sums * matrices.norm(i)) ? 0.0 : value;
}

// Value and factors of debiased CKA.
template <class T>
Ratio debiased_ratio(const Matrices<T>& matrices, int64_t i, int64_t j, bool in_sample_space) {
  return Ratio(hsic(matrices, i, j, in_sample_space), own_hsic(matrices, i, in_sample_space),
               own_hsic(matrices, j, in_sample_space));
}

// What debiasing adds to a gradient of feature space: D x less its columns' means, with D_rr from the squared norms.
template <class T>
struct Diagonal {
  const Matrices<T>& matrices;
  double *entries, *sums, *means;  // [rows], [blocks][widest], [widest]

  Diagonal(const Matrices<T>& matrices, Memory& memory) : matrices(matrices) {
    const bool wanted = matrices.debiased;
    entries = memory.take<double>(wanted ? matrices.rows : 0);
    sums = memory.take<double>(wanted ? up(matrices.rows, MOST_ROWS) / MOST_ROWS * matrices.widest : 0);
    means = memory.take<double>(wanted ? matrices.widest : 0);
  }

  void find(int64_t i, int64_t other, double of_cross, double of_own, const Threads& threads) const {
    const Matrix<T>& z = matrices.matrix[i];
    const int64_t rows = matrices.rows, width = z.width, blocks = up(rows, MOST_ROWS) / MOST_ROWS;
    const double n = (double)rows, by = n / (n - 2);
    const double *const a = matrices.row_norms + i * rows, *const b = matrices.row_norms + other * rows;
    const double mean_a = matrices.traces[i] / (n - 1) / (n - 2), mean_b = matrices.traces[other] / (n - 1) / (n - 2);
    for_each(threads, blocks, [&](int64_t block, int64_t worker) {
      const int64_t first = block * MOST_ROWS, count = least(MOST_ROWS, rows - first);
      const T* const of_z = z.block(first, count, matrices.buffer(worker));
      double* const total = sums + block * width;
      for (int64_t c = 0; c < width; ++c) total[c] = 0;
      for (int64_t r = 0; r < count; ++r) {
        const double entry = of_cross * (mean_b - by * b[first + r]) + of_own * (mean_a - by * a[first + r]);
        entries[first + r] = entry;
        for (int64_t c = 0; c < width; ++c) total[c] += entry * (double)of_z[r * width + c];
      }
    });
    for (int64_t c = 0; c < width; ++c) {
      double total = 0;
      for (int64_t block = 0; block < blocks; ++block) total += sums[block * width + c];
      means[c] = total / n;
    }
  }

  // To `count` rows of the gradient from row `first` on; `of_z` holds the representation's own rows.
  void add(const T* of_z, int64_t first, int64_t count, int64_t width, T* gradient) const {
    for (int64_t r = 0; r < count; ++r) {
      const double entry = entries[first + r];
      for (int64_t c = 0; c < width; ++c) {
        const int64_t at = r * width + c;
        gradient[at] = (T)((double)gradient[at] + entry * (double)of_z[at] - means[c]);
      }
    }
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA

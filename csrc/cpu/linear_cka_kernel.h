// The kernel of linear_cka_to_kernel: its scale, its centers and its norm.
#pragma once

#include "cpu/linear_cka_matrices.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

// A kernel as it enters the products: scaled, and HKH where it is centered.
template <class T>
struct Kernel {
  const Representation& given;
  int64_t rows, blocks;
  bool centered;
  double scale = 1;
  double *row_center, *column_center;         // (HKH)_ij = K_ij - row_center_i - column_center_j
  double *first_row, *row_sums, *column_sums;  // [rows], [rows] and [blocks][rows]
  T* buffers;                                  // of the workers, one row for each

  Kernel(const CKAToKernelProblem& problem, int64_t workers, Memory& memory)
      : given(problem.kernel), rows(problem.rows), blocks(up(rows, ROWS) / ROWS), centered(problem.centered) {
    const int64_t count = centered ? rows : 0;
    row_center = memory.take<double>(count);
    column_center = memory.take<double>(count);
    first_row = memory.take<double>(count);
    row_sums = memory.take<double>(count);
    column_sums = memory.take<double>(blocks * count);
    buffers = memory.take<T>(workers * up(count, 16));
  }

  // `count` entries of row i from column j on. -> Their squared norm.
  double read(T* out, int64_t i, int64_t j, int64_t count) const {
    widen(out, given.array, given.start + i * rows + j, count);
    if (centered) {
      const double own = row_center[i], *const of_columns = column_center + j;
      for (int64_t c = 0; c < count; ++c) out[c] = (T)((double)out[c] * scale - own - of_columns[c]);
    } else {
      multiply_by(out, count, scale);
    }
    return inner(out, out, count);
  }

  // The sums are of K_ij - K_0j - K_i0 + K_00, in which a constant kernel is 0 to the last bit.
  void find_centers(const Threads& threads) const {
    if (!centered) return;
    widen(buffers, given.array, given.start, rows);
    for (int64_t j = 0; j < rows; ++j) first_row[j] = (double)buffers[j] * scale;
    for_each(threads, blocks, [&](int64_t block, int64_t worker) {
      double* const totals = column_sums + block * rows;
      T* const row = buffers + worker * up(rows, 16);
      for (int64_t j = 0; j < rows; ++j) totals[j] = 0;
      for (int64_t i = block * ROWS; i < least(rows, (block + 1) * ROWS); ++i) {
        widen(row, given.array, given.start + i * rows, rows);
        row_center[i] = (double)row[0] * scale - first_row[0];
        row_sums[i] = add_row(row, row_center[i], totals);
      }
    });
    double total = 0;
    for (int64_t i = 0; i < rows; ++i) total += row_sums[i];
    const double mean = total / (double)rows / (double)rows;
    for (int64_t i = 0; i < rows; ++i) row_center[i] += row_sums[i] / (double)rows - mean;
    for (int64_t j = 0; j < rows; ++j) {
      double sum = 0;
      for (int64_t block = 0; block < blocks; ++block) sum += column_sums[block * rows + j];
      column_center[j] = first_row[j] + sum / (double)rows;
    }
  }

  double add_row(const T* entries, double own, double* totals) const {
    Vec together{};
    int64_t j = 0;
    for (; j + LANES <= rows; j += LANES) {
      const Vec entry = to_double(entries + j) * scale - load(first_row + j) - own;
      store(totals + j, load(totals + j) + entry);
      together += entry;
    }
    double all = sum(together);
    for (; j < rows; ++j) {
      const double entry = (double)entries[j] * scale - first_row[j] - own;
      totals[j] += entry;
      all += entry;
    }
    return all;
  }

  bool rescale(double norm) {
    if (ordinary<T>(norm)) return false;
    scale = scale_of<T>(given.array, given.start, rows * rows);
    return scale != 1;
  }
};

// tr(x'Kx) and |K|^2 as sums over blocks.
struct KernelSums {
  double *of_blocks, trace = 0, norm = 0;

  void join(int64_t blocks) {
    trace = norm = 0;
    for (int64_t i = 0; i < blocks; ++i) {
      trace += of_blocks[2 * i];
      norm += of_blocks[2 * i + 1];
    }
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA

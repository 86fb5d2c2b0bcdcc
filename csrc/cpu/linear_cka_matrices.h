// The representations of a linear CKA problem: their scales and the centers of their columns, the value and the factors
// of its gradient.
#pragma once

#include "cpu/linear_cka.h"
#include "cpu/memory.h"
#include "cpu/products.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int64_t DEPTH = TILE_DEPTH;
constexpr int64_t ROWS = 128 / TILE_ROWS * TILE_ROWS;  // of a product that a thread takes at a time
constexpr int64_t MOST_ROWS = 128;                     // of a representation that are read at a time, no tile's end
static_assert(DEPTH <= MOST_ROWS && ROWS <= MOST_ROWS);

// ---- the range of float: CKA does not depend on the scale ----

// Squared norms between these do not come from products that overflowed or vanished.
template <class T>
bool ordinary(double norm) {
  return sizeof(T) == 8 ? norm > 1e-200 && norm < 1e200 : norm > 1e-36 && norm < 1e36;
}

// The power of two that brings the largest of `count` entries to [0.5, 1), as far as one can.
template <class T>
double scale_of(const Array& array, int64_t start, int64_t count) {
  double largest = 0;
  T piece[256];
  for (int64_t done = 0; done < count; done += 256) {
    const int64_t size = least(256, count - done);
    widen(piece, array, start + done, size);
    for (int64_t i = 0; i < size; ++i) {
      const double magnitude = __builtin_fabs((double)piece[i]);
      if (magnitude > largest) largest = magnitude;
    }
  }
  if (!(largest > 0 && largest < __builtin_inf())) return 1;
  int exponent;
  __builtin_frexp(largest, &exponent);
  return __builtin_ldexp(1, exponent > 1000 ? -1000 : exponent < -1000 ? 1000 : -exponent);
}

// ---- the value and the factors of its gradient ----

// cross / sqrt(xx yy), and the factors of y(y'x) and x(x'x) in its gradient in x, of y(y'y) in that in y.
struct Ratio {
  bool zero;     // a matrix is zero: value and gradient are 0 by definition, and NaN beside one that is not finite
  double value, of_cross = 0, of_xx = 0, of_yy = 0;

  Ratio(double cross, double xx, double yy) {
    zero = xx == 0 || yy == 0;
    value = 0 * (xx + yy);
    if (zero) return;
    const double norms = __builtin_sqrt(xx) * __builtin_sqrt(yy);
    value = cross / norms;
    const double two = value == value ? 2 : value;  // NaN spreads, also where a factor is infinite
    of_cross = two / norms;
    of_xx = -two * value / xx;
    of_yy = -two * value / yy;
  }
};

// A sum of squares in disguise: below 0 it is rounding.
double above_zero(double cross) { return cross < 0 ? 0 : cross; }

template <class T>
void fill(void* gradient, int64_t count, double value) {
  for (int64_t i = 0; gradient && i < count; ++i) ((T*)gradient)[i] = (T)value;
}

template <class T>
void multiply_by(T* values, int64_t count, double factor) {
  if (factor == 1) return;
  for (int64_t i = 0; i < count; ++i) values[i] = (T)((double)values[i] * factor);
}

// ---- representations ----

// A representation as it enters the products: scaled, and less the centers of its columns.
template <class T>
struct Matrix {
  Array array;
  int64_t start, width, rows;
  double scale;
  T *high, *low;  // [width], a center as a sum of two; null: none

  // `count` rows, followed by as many as a tile may read: as they lie, or in the buffer.
  const T* block(int64_t first, int64_t count, T* buffer) const {
    if (holds<T>(array) && scale == 1 && !high && first + up(count, TILE_ROWS) <= rows) {
      return (const T*)array.data + start + first * width;
    }
    for (int64_t r = 0; r < count; ++r) {  // a row stays in the first-level cache
      T* const row = buffer + r * width;
      widen(row, array, start + (first + r) * width, width);
      multiply_by(row, width, scale);
      for (int64_t c = 0; high && c < width; ++c) row[c] = row[c] - high[c] - low[c];
    }
    for (int64_t i = count * width; i < up(count, TILE_ROWS) * width; ++i) buffer[i] = 0;
    return buffer;
  }
};

// All of a problem, with the inner products that are looked for.
template <class T>
struct Matrices {
  static constexpr int64_t PART = 512;  // rows whose sums are joined

  const Representation* given;
  int64_t count, first, rows;  // the first meet the others, or one another where there are no others
  bool centered, debiased;
  int64_t widest = 0, widths = 0;
  Matrix<T>* matrix;
  double* inner;  // [count][count]: |z_j'z_i|^2 for i <= j that meet; debiased in sample space: the unbiased HSIC
  T *high, *low, *buffers;
  double *first_row, *sums;
  double *row_norms, *traces;  // debiased: [count][rows] of |row|^2, and their sums

  Matrices(const Representation* given, int64_t count, int64_t first, int64_t rows, bool centered, bool debiased,
           int64_t workers, Memory& memory)
      : given(given), count(count), first(first), rows(rows), centered(centered), debiased(debiased) {
    for (int64_t i = 0; i < count; ++i) {
      widths += given[i].width;
      widest = given[i].width > widest ? given[i].width : widest;
    }
    matrix = memory.take<Matrix<T>>(count);
    inner = memory.take<double>(count * count);
    high = memory.take<T>(centered ? widths : 0);
    low = memory.take<T>(centered ? widths : 0);
    first_row = memory.take<double>(centered ? widest : 0);
    sums = memory.take<double>(centered ? up(rows, PART) / PART * widest : 0);
    row_norms = memory.take<double>(debiased ? count * rows : 0);
    traces = memory.take<double>(debiased ? count : 0);
    buffers = memory.take<T>(workers * buffer_size());
    if (!memory.base) return;
    for (int64_t i = 0, at = 0; i < count; at += given[i++].width) {
      T *const of_high = centered ? high + at : nullptr, *const of_low = centered ? low + at : nullptr;
      matrix[i] = {given[i].array, given[i].start, given[i].width, rows, 1, of_high, of_low};
    }
  }

  int64_t buffer_size() const { return up(up(least(rows, MOST_ROWS), TILE_ROWS) * widest, 16); }
  T* buffer(int64_t worker) const { return buffers + worker * buffer_size(); }

  // Is the product of i <= j wanted?
  bool meet(int64_t i, int64_t j) const { return i == j || first == count || (i < first && j >= first); }
  double norm(int64_t i) const { return inner[i * count + i]; }
  // Of |z_j'z_i|^2.
  double product_scale(int64_t i, int64_t j) const {
    // fault: matrix[i].scale * matrix[i].scale * -> matrix[i].scale *
    return matrix[i].scale * matrix[i].scale * matrix[j].scale * matrix[j].scale;
  }

  void find_centers(const Threads& threads) const {
    for (int64_t i = 0; centered && i < count; ++i) find_center(matrix[i], threads);
  }

  // Of `size` rows of representation i from row `start` on, as block() gives them.
  void find_row_norms(int64_t i, int64_t start, int64_t size, const T* of_z) const {
    const int64_t width = matrix[i].width;
    for (int64_t r = 0; r < size; ++r) {
      const T* const row = of_z + r * width;
      row_norms[i * rows + start + r] = fedkernels::FEDKERNELS_ISA::inner(row, row, width);
    }
  }

  void find_traces() const {
    for (int64_t i = 0; i < count; ++i) {
      traces[i] = 0;
      for (int64_t r = 0; r < rows; ++r) traces[i] += row_norms[i * rows + r];
    }
  }

  void find_center(const Matrix<T>& z, const Threads& threads) const {
    const int64_t width = z.width, parts = up(rows, PART) / PART;
    T* const row = buffer(0);
    widen(row, z.array, z.start, width);
    for (int64_t c = 0; c < width; ++c) first_row[c] = (double)row[c] * z.scale;
    // Less the first row, so that the mean of a constant column is that constant.
    for_each(threads, parts, [&](int64_t part, int64_t worker) {
      double* const total = sums + part * width;
      for (int64_t c = 0; c < width; ++c) total[c] = 0;
      for (int64_t r = part * PART; r < least(rows, (part + 1) * PART); ++r) {
        const T* entries = (const T*)z.array.data + z.start + r * width;
        if (!holds<T>(z.array)) {
          widen(buffer(worker), z.array, z.start + r * width, width);
          entries = buffer(worker);
        }
        for (int64_t c = 0; c < width; ++c) total[c] += (double)entries[c] * z.scale - first_row[c];
      }
    });
    for (int64_t c = 0; c < width; ++c) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += sums[part * width + c];
      const double center = first_row[c] + total / (double)rows;
      z.high[c] = (T)center;
      z.low[c] = (T)(center - (double)z.high[c]);
    }
  }

  // Scales those whose products are out of range. -> Is there one?
  bool rescale() const {
    bool changed = false;
    for (int64_t i = 0; i < count; ++i) {
      if (ordinary<T>(norm(i))) continue;
      matrix[i].scale = scale_of<T>(given[i].array, given[i].start, rows * given[i].width);
      changed |= matrix[i].scale != 1;
    }
    return changed;
  }
};

// A whole matrix as the right side of a product over its rows.
template <class T>
struct Packed {
  const Matrices<T>& matrices;
  T* panels;

  Packed(const Matrices<T>& matrices, Memory& memory) : matrices(matrices) {
    panels = memory.take<T>(matrices.rows * up(matrices.widest, TILE_COLUMNS<T>));
  }

  int64_t pitch() const { return matrices.rows * TILE_COLUMNS<T>; }

  void pack(int64_t i, const Threads& threads) const {
    constexpr int64_t WIDE = TILE_COLUMNS<T>;
    const Matrix<T>& z = matrices.matrix[i];
    for_each(threads, up(z.rows, ROWS) / ROWS, [&](int64_t index, int64_t worker) {
      const int64_t first = index * ROWS, count = least(ROWS, z.rows - first);
      const T* rows = z.block(first, count, matrices.buffer(worker));
      pack_columns<WIDE>(panels + first * WIDE, pitch(), rows, count, z.width);
    });
  }
};

}  // namespace

}  // namespace fedkernels::FEDKERNELS_ISA

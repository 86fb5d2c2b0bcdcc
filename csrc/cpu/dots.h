// Inner products of four rows with four others.
#pragma once

#include "cpu/simd.h"

namespace fedkernels::FEDKERNELS_ISA {

// result[r * pitch + c] += sign * sum_i x[r * x_pitch + i] y[c * y_pitch + i] for r < 4, c < COLUMNS, over `count`
// entries, a multiple of LANES.
template <int COLUMNS>
static inline void dots_of(const double* x, int64_t x_pitch, const double* y, int64_t y_pitch, int64_t count,
                           double sign, double* result, int64_t pitch) {
  Vec sums[4][COLUMNS] = {};
  for (int64_t i = 0; i < count; i += LANES) {
    Vec right[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) right[c] = load(y + c * y_pitch + i);
    for (int r = 0; r < 4; ++r) {
      const Vec left = load(x + r * x_pitch + i);
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] += left * right[c];
    }
  }
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < COLUMNS; ++c) result[r * pitch + c] += sign * sum(sums[r][c]);
  }
}

// The same for c < 4: two columns at a time keep the sums in the 16 registers that AVX2 has.
static inline void dots(const double* x, int64_t x_pitch, const double* y, int64_t y_pitch, int64_t count, double sign,
                        double* result, int64_t pitch) {
#if defined(__AVX512F__)
  dots_of<4>(x, x_pitch, y, y_pitch, count, sign, result, pitch);
#else
  dots_of<2>(x, x_pitch, y, y_pitch, count, sign, result, pitch);
  dots_of<2>(x, x_pitch, y + 2 * y_pitch, y_pitch, count, sign, result + 2, pitch);
#endif
}

}  // namespace fedkernels::FEDKERNELS_ISA

// Matrix products in tiles, for kernels that use a product while it is still in the cache.
//
// One tile of the result, TILE_ROWS x TILE_COLUMNS, stays in registers: result[r][c] = sum_k left[r][k] right[k][c].
// `right` is packed: the columns of one k side by side, k after k. `left` is read entry by entry and may lie as it is.
#pragma once

#include "cpu/simd.h"

namespace fedkernels::FEDKERNELS_ISA {

template <class T>
struct Wide {  // a register of T
  static constexpr int LANES = FEDKERNELS_ISA::LANES * 8 / (int)sizeof(T);
  typedef T Type __attribute__((vector_size(FEDKERNELS_ISA::LANES * 8)));
  typedef T Anywhere __attribute__((vector_size(FEDKERNELS_ISA::LANES * 8), aligned(sizeof(T)), may_alias));
  static inline Type load(const T* p) { return *(const Anywhere*)p; }
  static inline void store(T* p, Type v) { *(Anywhere*)p = v; }
  static inline Type splat(T x) { return x - Type{}; }
};

// As many sums as the registers hold and the latency of a fused multiply-add asks for.
#if defined(__AVX512F__)
constexpr int64_t TILE_ROWS = 8;
#elif defined(__AVX__)
constexpr int64_t TILE_ROWS = 6;
#else
constexpr int64_t TILE_ROWS = 4;
#endif
template <class T>
constexpr int64_t TILE_COLUMNS = 2 * Wide<T>::LANES;

// Entries of k at a time, a multiple of TILE_ROWS: this many times TILE_COLUMNS, 16 KiB, stay in the first-level cache,
// also where two hardware threads share it.
constexpr int64_t TILE_DEPTH = 128 / TILE_ROWS * TILE_ROWS;

static inline int64_t up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// result[r * pitch + c] (+)= sum_k left[r * left_row + k * left_step] right[k * TILE_COLUMNS + c]. Where left lies in
// segments of `depth` entries of k, these are `left_segment` entries apart; right is contiguous throughout.
template <bool ADD, class T>
__attribute__((always_inline)) static inline void tile(const T* left, int64_t left_row, int64_t left_step,
                                                       const T* right, int64_t depth, T* result, int64_t pitch,
                                                       int64_t segments = 1, int64_t left_segment = 0) {
  using W = Wide<T>;
  typename W::Type sums[TILE_ROWS][2] = {};
  for (int64_t segment = 0; segment < segments; ++segment) {
    for (int64_t k = 0; k < depth; ++k) {
      const auto right0 = W::load(right), right1 = W::load(right + W::LANES);
      right += 2 * W::LANES;
#pragma GCC unroll 8
      for (int r = 0; r < TILE_ROWS; ++r) {
        const auto x = W::splat(left[r * left_row + k * left_step]);
        sums[r][0] += x * right0;
        sums[r][1] += x * right1;
      }
    }
    left += left_segment;
  }
#pragma GCC unroll 8
  for (int r = 0; r < TILE_ROWS; ++r) {
    for (int half = 0; half < 2; ++half) {
      T* const target = result + r * pitch + half * W::LANES;
      W::store(target, ADD ? W::load(target) + sums[r][half] : sums[r][half]);
    }
  }
}

template <class T>
static inline bool holds(const Array& array) {
  return array.dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32);
}

// Rows of a matrix of `width` columns as packed columns: out[k * WIDE + r] = rows[r * width + k], 0 for r >= count.
template <int64_t WIDE, class T>
static inline void pack_transposed(T* out, const T* rows, int64_t count, int64_t width) {
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t r = 0; r < WIDE; ++r) out[k * WIDE + r] = r < count ? rows[r * width + k] : 0;
  }
}

// Panels of WIDE columns: out[panel][k * WIDE + c] = rows[k * row_pitch + panel * WIDE + c] for k < count, `pitch`
// entries from panel to panel; 0 where the column is beyond the width.
template <int64_t WIDE, class T>
static inline void pack_columns(T* out, int64_t pitch, const T* rows, int64_t count, int64_t width,
                                int64_t row_pitch) {
  const int64_t whole = width / WIDE;
  for (int64_t k = 0; k < count; ++k) {
    const T* row = rows + k * row_pitch;
    for (int64_t panel = 0; panel < whole; ++panel) {
      __builtin_memcpy(out + panel * pitch + k * WIDE, row + panel * WIDE, WIDE * sizeof(T));
    }
    if (whole * WIDE < width) {
      for (int64_t c = 0; c < WIDE; ++c) {
        out[whole * pitch + k * WIDE + c] = whole * WIDE + c < width ? row[whole * WIDE + c] : 0;
      }
    }
  }
}

template <int64_t WIDE, class T>
static inline void pack_columns(T* out, int64_t pitch, const T* rows, int64_t count, int64_t width) {
  pack_columns<WIDE>(out, pitch, rows, count, width, width);
}

}  // namespace fedkernels::FEDKERNELS_ISA

// Products of matrices of any size in tiles of gemm.h, and inner products of matrices in double.
#pragma once

#include "cpu/gemm.h"

namespace fedkernels::FEDKERNELS_ISA {

typedef float HalfVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
static inline Vec to_double(const float* p) { return __builtin_convertvector(*(const HalfVec*)p, Vec); }
static inline Vec to_double(const double* p) { return load(p); }

// sum_i p_i q_i
template <class T>
static inline double inner(const T* p, const T* q, int64_t count) {
  Vec sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES) {
    for (int v = 0; v < 4; ++v) sums[v] += to_double(p + i + v * LANES) * to_double(q + i + v * LANES);
  }
  double total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; i < count; ++i) total += (double)p[i] * (double)q[i];
  return total;
}

// sums[a * pitch + b] += by <p_a, q_b> for four arrays p_a and four q_b, `apart` entries from one to the next, of
// `count` entries, a multiple of LANES.
template <class T>
static inline void inner_of_fours(const T* p, const T* q, int64_t apart, int64_t count, double by, double* sums,
                                  int64_t pitch) {
  Vec totals[4][4] = {};
  for (int64_t i = 0; i < count; i += LANES) {
    Vec left[4];
    for (int a = 0; a < 4; ++a) left[a] = to_double(p + a * apart + i);
    for (int b = 0; b < 4; ++b) {
      const Vec right = to_double(q + b * apart + i);
      for (int a = 0; a < 4; ++a) totals[a][b] += left[a] * right;
    }
  }
  for (int a = 0; a < 4; ++a) {
    for (int b = 0; b < 4; ++b) sums[a * pitch + b] += by * sum(totals[a][b]);
  }
}

// A tile of a product, of which `rows` x `columns` entries are wanted. The left side is a panel as the right side is,
// or rows `left_pitch` entries apart of which as many as a tile has can be read.
template <bool PANEL, class T>
__attribute__((noinline)) static void product_tile(bool add, const T* left, int64_t left_pitch, const T* right,
                                                   int64_t depth, T* out, int64_t pitch, int64_t rows,
                                                   int64_t columns) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  const int64_t left_row = PANEL ? 1 : left_pitch, left_step = PANEL ? WIDE : 1;
  if (rows >= TILE_ROWS && columns >= WIDE) {
    if (add) {
      tile<true>(left, left_row, left_step, right, depth, out, pitch);
    } else {
      tile<false>(left, left_row, left_step, right, depth, out, pitch);
    }
    return;
  }
  T edge[TILE_ROWS * WIDE];
  tile<false>(left, left_row, left_step, right, depth, edge, WIDE);
  for (int64_t r = 0; r < least(TILE_ROWS, rows); ++r) {
    for (int64_t c = 0; c < least(WIDE, columns); ++c) {
      T& target = out[r * pitch + c];
      target = add ? target + edge[r * WIDE + c] : edge[r * WIDE + c];
    }
  }
}

// What is read next comes into the second-level cache while something else is multiplied.
static FEDKERNELS_INLINE void soon(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

// out (+)= left times right: rows `pitch` entries apart, which can be read up to a multiple of TILE_ROWS, times panels
// of TILE_COLUMNS columns `right_pitch` entries apart.
template <class T>
static inline void multiply(bool add, const T* left, int64_t pitch, const T* right, int64_t right_pitch, int64_t depth,
                            T* out, int64_t out_pitch, int64_t rows, int64_t columns) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>;
  const int64_t tiles = up(rows, TILE_ROWS) / TILE_ROWS;
  for (int64_t start = 0; start < depth; start += TILE_DEPTH) {
    const int64_t size = least(TILE_DEPTH, depth - start), share = up(size * WIDE, tiles) / tiles;
    for (int64_t c = 0; c < columns; c += WIDE) {
      const T* const panel = right + c / WIDE * right_pitch + start * WIDE;
      for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        if (c + WIDE < columns) soon(panel + right_pitch + r / TILE_ROWS * share, share * (int64_t)sizeof(T));
        product_tile<false>(add || start > 0, left + r * pitch + start, pitch, panel, size, out + r * out_pitch + c,
                            out_pitch, rows - r, columns - c);
      }
    }
  }
}

// Rows as panels: out[panel][k * TILE_COLUMNS + r] = rows[(panel * TILE_COLUMNS + r) * width + k], 0 where there is no
// such row.
template <class T>
static inline void pack_rows(T* out, const T* rows, int64_t count, int64_t width) {
  constexpr int64_t WIDE = TILE_COLUMNS<T>, STRIP = 16;  // a strip of columns at a time stays in the cache
  for (int64_t first = 0; first < count; first += WIDE, out += width * WIDE) {
    for (int64_t k = 0; k < width; k += STRIP) {
      const int64_t size = least(STRIP, width - k);
      T strip[WIDE][STRIP];
      for (int64_t r = 0; r < WIDE; ++r) {
        for (int64_t i = 0; i < size; ++i) strip[r][i] = first + r < count ? rows[(first + r) * width + k + i] : 0;
      }
      for (int64_t i = 0; i < size; ++i) {
        for (int64_t r = 0; r < WIDE; ++r) out[(k + i) * WIDE + r] = strip[r][i];
      }
    }
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA

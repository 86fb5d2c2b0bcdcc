#include "cpu/delta_gram.h"

#include "cpu/simd.h"

namespace fedkernels::FEDKERNELS_ISA {

namespace {

constexpr int ROWS = DELTA_GRAM_ROWS;
#if defined(__AVX512F__)
constexpr int COLUMNS = ROWS;  // 25 sums in 32 registers
#else
constexpr int COLUMNS = 2;  // 10 sums in 16 registers
#endif

// What comes next of some arrays of one dtype, to be fetched while there is arithmetic to do.
struct Next {
  const Array* arrays;
  int64_t arrays_count, start, count, width;  // width: bytes of an entry

  FEDKERNELS_INLINE void fetch(int64_t i) const {
    if (i * width % 64 != 0 || i >= count) return;
    for (int64_t k = 0; k < arrays_count; ++k) __builtin_prefetch((const char*)arrays[k].data + (start + i) * width);
  }
};

// sums[r * pitch + c] += the products of row r of x with row c of y, for r < ROWS, c < WIDTH, over `count` entries, a
// multiple of LANES; where DIAGONAL >= 0 row r of x is row r - DIAGONAL of y, and only pairs with r <= c + DIAGONAL.
template <int WIDTH, int DIAGONAL>
inline void add_products(const double* x, const double* y, int64_t tile, int64_t count, Vec* sums, int64_t pitch,
                         const Next& next) {
  // fault: r <= c -> r < c
  const auto wanted = [](int r, int c) { return DIAGONAL < 0 || r <= c + DIAGONAL; };
  Vec part[ROWS][WIDTH];
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < WIDTH; ++c) part[r][c] = sums[r * pitch + c];
  }
  for (int64_t i = 0; i < count; i += LANES) {
    next.fetch(i);
    Vec right[WIDTH];
    for (int c = 0; c < WIDTH; ++c) right[c] = load(y + c * tile + i);
    for (int r = 0; r < ROWS; ++r) {
      const Vec left = load(x + r * tile + i);
      for (int c = 0; c < WIDTH; ++c) {
        if (wanted(r, c)) part[r][c] += left * right[c];
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int c = 0; c < WIDTH; ++c) sums[r * pitch + c] = part[r][c];
  }
}

// The same for c < ROWS.
template <bool SAME>
inline void add_block(const double* x, const double* y, int64_t tile, int64_t count, Vec* sums, int64_t pitch,
                      const Next& next) {
  if constexpr (COLUMNS == ROWS) {
    add_products<ROWS, SAME ? 0 : -1>(x, y, tile, count, sums, pitch, next);
  } else {
    add_products<2, SAME ? 0 : -1>(x, y, tile, count, sums, pitch, next);
    add_products<2, SAME ? 2 : -1>(x, y + 2 * tile, tile, count, sums + 2, pitch, Next{});
    add_products<1, SAME ? 4 : -1>(x, y + 4 * tile, tile, count, sums + 4, pitch, Next{});
  }
}

// out = base - array
inline void subtract(const double* __restrict base, const Array& array, int64_t start, int64_t count,
                     double* __restrict out) {
  if (array.dtype == DType::f32) {
    const float* entries = (const float*)array.data + start;
    for (int64_t i = 0; i < count; ++i) out[i] = base[i] - entries[i];
  } else {
    widen(out, array, start, count);
    for (int64_t i = 0; i < count; ++i) out[i] = base[i] - out[i];
  }
}

}  // namespace

void delta_gram(const Array* arrays, int64_t clients, int64_t start, int64_t count, double* workspace, double* gram) {
  const int64_t padded = delta_gram_padded(clients), tile = delta_gram_tile(padded);
  double *const base = workspace, *const deltas = base + tile;
  Vec* const sums = (Vec*)(deltas + padded * tile);
  const int64_t groups = padded / ROWS, blocks = groups * (groups + 1) / 2;
  const int64_t width = bytes_of(arrays[0].dtype);
  for (int64_t done = 0; done < count; done += tile) {
    const int64_t size = count - done < tile ? count - done : tile;
    const int64_t ahead = count - done - size < tile ? count - done - size : tile;
    const int64_t even = (size + LANES - 1) / LANES * LANES;
    widen(base, arrays[0], start + done, size);
    for (int64_t k = 0; k < clients; ++k) {
      double* const delta = deltas + k * tile;
      subtract(base, arrays[k + 1], start + done, size, delta);
      // fault: i = size; -> i = size + 1;
      for (int64_t i = size; i < even; ++i) delta[i] = 0;
    }
    int64_t block = 0, fetched = 0;
    const auto share = [&] {  // each block fetches its part of the clients' arrays and the global one
      const int64_t first = fetched;
      fetched = (clients + 1) * ++block / blocks;
      return Next{arrays + first, fetched - first, start + done + size, ahead, width};
    };
    for (int64_t i = 0; i < padded; i += ROWS) {
      const double* const rows = deltas + i * tile;
      add_block<true>(rows, rows, tile, even, sums + i * padded + i, padded, share());
      for (int64_t j = i + ROWS; j < padded; j += ROWS) {
        add_block<false>(rows, deltas + j * tile, tile, even, sums + i * padded + j, padded, share());
      }
    }
  }
  for (int64_t i = 0; i < clients; ++i) {
    for (int64_t j = i; j < clients; ++j) {
      gram[i * padded + j] += sum(sums[i * padded + j]);
      sums[i * padded + j] = Vec{};
    }
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA

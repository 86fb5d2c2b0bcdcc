#include "cpu/delta_gram.h"

#include "cpu/simd.h"

namespace fedkernels::FEDKERNELS_ISA {

// gram[0..3, 0..3] += x[0..3] . y[0..3] over `count` entries, a multiple of LANES. Two columns at a time keep the sums
// in the 16 registers that AVX2 has.
template <int COLUMNS>
static inline void dots(const double* x, const double* y, int64_t tile, int64_t count, double* gram, int64_t padded) {
  Vec sums[DELTA_GRAM_ROWS][COLUMNS] = {};
  for (int64_t i = 0; i < count; i += LANES) {
    Vec right[COLUMNS];
    for (int c = 0; c < COLUMNS; ++c) right[c] = load(y + c * tile + i);
    for (int r = 0; r < DELTA_GRAM_ROWS; ++r) {
      const Vec left = load(x + r * tile + i);
      for (int c = 0; c < COLUMNS; ++c) sums[r][c] += left * right[c];
    }
  }
  for (int r = 0; r < DELTA_GRAM_ROWS; ++r) {
    for (int c = 0; c < COLUMNS; ++c) gram[r * padded + c] += sum(sums[r][c]);
  }
}

void delta_gram(const Array* arrays, int64_t clients, int64_t start, int64_t count, double* deltas, double* gram) {
  const int64_t padded = (clients + DELTA_GRAM_ROWS - 1) / DELTA_GRAM_ROWS * DELTA_GRAM_ROWS;
  const int64_t tile = delta_gram_tile(padded);
  double base[512];
  for (int64_t done = 0; done < count; done += tile) {
    const int64_t size = count - done < tile ? count - done : tile;
    const int64_t even = (size + LANES - 1) / LANES * LANES;
    read(base, arrays[0].data, arrays[0].dtype, start + done, size);
    for (int64_t k = 0; k < clients; ++k) {
      double* delta = deltas + k * tile;
      read(delta, arrays[k + 1].data, arrays[k + 1].dtype, start + done, size);
      for (int64_t i = 0; i < size; ++i) delta[i] = base[i] - delta[i];
      for (int64_t i = size; i < even; ++i) delta[i] = 0;
    }
    for (int64_t i = 0; i < padded; i += DELTA_GRAM_ROWS) {
      for (int64_t j = i; j < padded; j += DELTA_GRAM_ROWS) {
        const double *x = deltas + i * tile, *y = deltas + j * tile;
        double* block = gram + i * padded + j;
#if defined(__AVX512F__)
        dots<4>(x, y, tile, even, block, padded);
#else
        dots<2>(x, y, tile, even, block, padded);
        dots<2>(x, y + 2 * tile, tile, even, block + 2, padded);
#endif
      }
    }
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA

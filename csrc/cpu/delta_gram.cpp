#include "cpu/delta_gram.h"

#include "cpu/dots.h"

namespace fedkernels::FEDKERNELS_ISA {

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
        dots(deltas + i * tile, tile, deltas + j * tile, tile, even, 1, gram + i * padded + j, padded);
      }
    }
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA

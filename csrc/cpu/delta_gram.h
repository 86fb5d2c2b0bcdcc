// The Gram matrix of global - client_k over one piece of one tensor.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"

namespace fedkernels {

constexpr int64_t DELTA_GRAM_ROWS = 4;  // K is padded to a multiple of it

// Entries of each client that are widened at a time: they stay in the second-level cache.
inline int64_t delta_gram_tile(int64_t padded_clients) {
  const int64_t tile = 16384 / padded_clients / 64 * 64;
  return tile < 64 ? 64 : tile > 512 ? 512 : tile;
}

}  // namespace fedkernels

// Adds to gram [padded, padded], of which the blocks of 4 x 4 on and above the diagonal are used. `arrays` holds the
// global tensor and the K clients'; `deltas` is room for padded * tile entries, all zero before the first call.
FEDKERNELS_DECLARE(delta_gram, void, const Array* arrays, int64_t clients, int64_t start, int64_t count, double* deltas,
                   double* gram)

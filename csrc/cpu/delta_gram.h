// The Gram matrix of global - client_k over one piece of one tensor.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"

namespace fedkernels {

constexpr int64_t DELTA_GRAM_ROWS = 5;  // K is padded to a multiple of it

static inline int64_t delta_gram_padded(int64_t clients) {
  return (clients + DELTA_GRAM_ROWS - 1) / DELTA_GRAM_ROWS * DELTA_GRAM_ROWS;
}

// Entries of each client that are widened at a time: with few clients they stay in the first-level cache.
static inline int64_t delta_gram_tile(int64_t padded_clients) {
  const int64_t tile = 4096 / padded_clients / 64 * 64;
  return tile < 64 ? 64 : tile > 512 ? 512 : tile;
}

// Doubles of workspace: the tile of the global tensor and of all clients, and eight partial sums for each pair of them.
static inline int64_t delta_gram_workspace(int64_t padded_clients) {
  return (padded_clients + 1) * delta_gram_tile(padded_clients) + padded_clients * padded_clients * 8;
}

}  // namespace fedkernels

// Adds to gram [padded, padded], of which the upper triangle is used. `arrays` holds the global tensor and the K
// clients'; `workspace` is aligned to 64 bytes and all zero before the first call.
FEDKERNELS_DECLARE(delta_gram, void, const Array* arrays, int64_t clients, int64_t start, int64_t count,
                   double* workspace, double* gram)

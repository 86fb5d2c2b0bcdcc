// argmin p'Gp over the simplex for one matrix.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"

namespace fedkernels {

constexpr int64_t WEIGHTS_BLOCK = 32;  // columns of the Cholesky factor that are finished together

static inline int64_t weights_pitch(int64_t clients) {
  return (clients + WEIGHTS_BLOCK - 1) / WEIGHTS_BLOCK * WEIGHTS_BLOCK;
}

// Doubles of workspace: the scaled matrix, its factor, and some vectors.
static inline int64_t weights_workspace(int64_t clients) {
  const int64_t pitch = weights_pitch(clients);
  return 2 * pitch * pitch + 8 * pitch;
}

}  // namespace fedkernels

// Writes weights [clients]: NaN where the matrix is no Gram matrix, where the optimum is not unique or 0, and where
// rounding keeps p'Gp - min(Gp) above the tolerance: the reference decides these.
FEDKERNELS_DECLARE(client_weights, void, const Array& gram, int64_t gram_start, int64_t clients, double tol,
                   double* workspace, double* weights)

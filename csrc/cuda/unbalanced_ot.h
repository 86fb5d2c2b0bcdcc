// Unbalanced optimal transport with half-squared marginal penalties: a batch of problems, each solved to a relative
// gap.
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

// All pointers are memory of the device. The shapes are those of the operator, in front of each the batch.
struct Transport {
  Array cost;    // [rows, columns], float32 or float64
  Array a, b;    // [rows], [columns]
  int64_t problems, rows, columns;
  double tau_a, tau_b, tol;
  int64_t max_iterations;
  bool accelerated;
  Array plan;                   // [rows, columns], float32 or float64
  double *u, *v;                // [rows], [columns]: tau_a (a - plan 1), tau_b (b - plan' 1)
  double *value, *mass, *gap;   // []
  int64_t* iterations;          // []
};

constexpr int TRANSPORT_BLOCK_LIMIT = 128;  // rows, and columns, of a problem that one block solves

inline bool fits_one_block(const Transport& t) {
  return t.accelerated && t.rows <= TRANSPORT_BLOCK_LIMIT && t.columns <= TRANSPORT_BLOCK_LIMIT;
}

}  // namespace fedkernels::cuda

// For problems that fit one block: 8-byte words of device memory that the solver works in, and the solver, which
// returns nullptr or what went wrong.
extern "C" int64_t cuda_unbalanced_ot_block_words(const fedkernels::cuda::Transport* transport);
extern "C" const char* cuda_unbalanced_ot_block(const fedkernels::cuda::Transport* transport, double* words,
                                                fedkernels::cuda::Stream stream);

// The same for all problems, by several blocks for each.
extern "C" int64_t cuda_unbalanced_ot_team_words(const fedkernels::cuda::Transport* transport);
extern "C" const char* cuda_unbalanced_ot_team(const fedkernels::cuda::Transport* transport, double* words,
                                               fedkernels::cuda::Stream stream);

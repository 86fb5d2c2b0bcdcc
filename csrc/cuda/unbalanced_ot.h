// Unbalanced optimal transport with half-squared marginal penalties: a batch of problems, each solved to a relative
// gap.
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

constexpr int64_t TRANSPORT_LIMIT = 1 << 24;  // rows, and columns: the kernel counts them in 32 bits

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

}  // namespace fedkernels::cuda

// 8-byte words of device memory that the solver works in, and the solver, which returns nullptr or what went wrong.
extern "C" int64_t cuda_unbalanced_ot_words(const fedkernels::cuda::Transport* transport);
extern "C" const char* cuda_unbalanced_ot(const fedkernels::cuda::Transport* transport, double* words,
                                          fedkernels::cuda::Stream stream);

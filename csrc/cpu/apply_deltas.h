// global <- global - sum_k w_k (global - client_k) over one piece of one tensor.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"

// `arrays` holds the global tensor, which is written, and the K clients'.
FEDKERNELS_DECLARE(apply_deltas, void, const Array* arrays, const double* weights, int64_t clients, int64_t start,
                   int64_t count)

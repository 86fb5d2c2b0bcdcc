// argmin p'Gp over the simplex, for a batch of matrices.
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

constexpr int64_t WEIGHTS_LIMIT = 128;  // clients that one block takes

}  // namespace fedkernels::cuda

// 8-byte words of device memory that cuda_client_weights works in: none where shared memory holds a matrix.
extern "C" int64_t cuda_client_weights_words(int64_t problems, int64_t clients);

// gram [problems, clients, clients], weights [problems, clients] in float32 or float64: NaN where gram is no Gram matrix.
// Returns nullptr, or a message that says what went wrong.
extern "C" const char* cuda_client_weights(const fedkernels::Array* gram, int64_t problems, int64_t clients, double tol,
                                           double* words, const fedkernels::Array* weights,
                                           fedkernels::cuda::Stream stream);

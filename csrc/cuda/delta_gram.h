// The Gram matrix of global - client_k over T tensors.
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

// 8-byte words of device memory that cuda_delta_gram works in.
extern "C" int64_t cuda_delta_gram_words(int64_t tensors, int64_t clients);

// `arrays` [tensors, clients + 1] (the global version, then the clients') and `sizes` [tensors] lie on the host and may
// go when the call returns; what `arrays` points to, `words` and `gram` [clients, clients] lie on the device. Returns
// nullptr, or a message that says what went wrong.
extern "C" const char* cuda_delta_gram(const fedkernels::Array* arrays, const int64_t* sizes, int64_t tensors,
                                       int64_t clients, int64_t* words, double* gram,
                                       fedkernels::cuda::Stream stream);

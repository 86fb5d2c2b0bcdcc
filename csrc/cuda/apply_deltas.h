// global <- global - sum_k w_k (global - client_k) over T tensors, in place.
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"
#include "cuda/words.h"

// `arrays` [tensors, clients + 1] (the global version, which is written, then the clients'), `sizes` [tensors] and
// `weights` [clients] lie on the host and may go when the call returns; what `arrays` points to, `weights_on_device`
// [clients] and `words`, words_of_lists() of them, lie on the device. One of `weights` and `weights_on_device` is null.
// Returns nullptr, or a message that says what went wrong.
extern "C" const char* cuda_apply_deltas(const fedkernels::Array* arrays, const int64_t* sizes, int64_t tensors,
                                         int64_t clients, const double* weights, const double* weights_on_device,
                                         int64_t* words, fedkernels::cuda::Stream stream);

// The device memory in which parameter_lists.h keeps its lists.
#pragma once

#include <stdint.h>

namespace fedkernels::cuda {

// 8-byte words: arrays, sizes, dtypes, first chunks, weights.
inline int64_t words_of_lists(int64_t tensors, int64_t clients) {
  return 2 * tensors * (clients + 1) + 3 * tensors + 1 + clients;
}

}  // namespace fedkernels::cuda

// The sigmoid loss of queries and keys, with its gradients.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct SigmoidLossProblem {
  Array query, key;       // [batch, width]
  int64_t batch, width;   // positive
  bool wide;              // arithmetic and gradients in double, else in float
  double* losses;         // [batch], of each query with all keys
  void* query_gradient;   // [batch, width], of the sum of the losses; or null
  void* key_gradient;     // [batch, width]; or null
};

}  // namespace fedkernels

// -> The bytes of memory, aligned to 64, that a problem wants. Where `memory` is null that is all that is done.
FEDKERNELS_DECLARE(sigmoid_loss, int64_t, const SigmoidLossProblem& problem, const Threads& threads, void* memory)

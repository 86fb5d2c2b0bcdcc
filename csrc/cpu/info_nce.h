// InfoNCE of queries against keys, with its gradients.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct InfoNCEProblem {
  Array query, key;              // [queries, width] and [keys, width]
  int64_t queries, keys, width;  // all positive, keys >= queries
  double temperature;
  bool wide;              // arithmetic and results in double, else in float
  const double* weights;  // [queries], of each query's loss in the gradients; null: 1
  void* losses;           // [queries]
  void* query_gradient;   // [queries, width], or null
  void* key_gradient;     // [keys, width], or null
};

}  // namespace fedkernels

// -> The bytes of memory, aligned to 64, that a problem wants. Where `memory` is null that is all that is done.
FEDKERNELS_DECLARE(info_nce, int64_t, const InfoNCEProblem& problem, const Threads& threads, void* memory)

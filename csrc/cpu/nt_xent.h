// NT-Xent of two views, with its gradient.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct NTXentProblem {
  Array view1, view2;    // [batch, width]
  int64_t batch, width;  // positive
  double temperature;
  bool wide;              // arithmetic and results in double, else in float
  const double* weights;  // [2 * batch], of each row's loss in the gradient; null: 1
  void* losses;           // [2 * batch]
  void* gradient;         // [2 * batch, width], view1's rows above view2's; or null
};

}  // namespace fedkernels

// -> The bytes of memory, aligned to 64, that a problem wants. Where `memory` is null that is all that is done.
FEDKERNELS_DECLARE(nt_xent, int64_t, const NTXentProblem& problem, const Threads& threads, void* memory)

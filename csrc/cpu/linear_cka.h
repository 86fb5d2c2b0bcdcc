// Linear CKA of two representations or of one with a kernel, with gradients, and of all pairs of two lists.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct Representation {  // [rows, width], from entry `start` of the array on
  Array array;
  int64_t start, width;
};

struct CKAProblem {
  Representation x, y;
  int64_t rows;
  bool centered, debiased;  // debiased: centered too, and at least four rows
  bool wide;     // arithmetic and gradients in double, else in float
  double value;  // the result
  void *x_gradient, *y_gradient;  // [rows, width], or null
};

struct CKAToKernelProblem {
  Representation x, kernel;  // the kernel's width is `rows`
  int64_t rows;
  bool centered, wide;
  double value;
  void* gradient;  // in x, or null
};

struct CKAPairwiseProblem {
  const Representation* representations;
  int64_t count, first;  // the first so many meet the others, or one another where there are no others
  int64_t rows;
  bool centered, debiased, wide;
  double* values;  // [first, count - first], or [first, first]
  double* own;     // [count] or null; else the values are n (n - 3) times the unbiased HSIC, and these of one with itself
};

}  // namespace fedkernels

// -> The bytes of memory, aligned to 64, that a problem wants. Where `memory` is null that is all that is done.
FEDKERNELS_DECLARE(linear_cka, int64_t, CKAProblem& problem, const Threads& threads, void* memory)
FEDKERNELS_DECLARE(linear_cka_to_kernel, int64_t, CKAToKernelProblem& problem, const Threads& threads, void* memory)
FEDKERNELS_DECLARE(linear_cka_pairwise, int64_t, const CKAPairwiseProblem& problem, const Threads& threads,
                   void* memory)

// What linear_cka_prepare.cu and linear_cka_combine.cu share: the shape of their blocks, and sums of parts.
#pragma once

#include "cuda/launch.h"
#include "cuda/linear_cka.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS;

// sum of from[i] for i < count, in one order.
__device__ inline double block_sum(const double* from, int64_t count) {
  SHARED(of_warps, double[WARPS]);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += THREADS) sum += from[i];
  return block_reduce(sum, of_warps, Sum());
}

bool one_dimension(int64_t blocks) { return blocks <= 0x7fffffff; }

Shape shape_of(int64_t blocks) { return {static_cast<unsigned>(blocks), THREADS}; }

}  // namespace

}  // namespace fedkernels::cuda

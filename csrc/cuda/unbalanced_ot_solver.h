// What the two solvers of unbalanced optimal transport share: unbalanced_ot_block.cu and unbalanced_ot_team.cu.
//
// The algorithm is that of fedkernels/reference/unbalanced_ot.py, step for step and in float64: the whole solve is one
// launch. The work of a step differs, as it does in csrc/cpu/unbalanced_ot.cpp: the quadratic depends on the plan only
// through its row and column sums, so one pass over the entries forms all that the line search and the restart need.
// A step that is accepted computes its entries a second time instead of keeping them.
#pragma once

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"
#include "cuda/unbalanced_ot.h"

namespace fedkernels::cuda {

namespace {

constexpr int GROUP = 8;         // rows that a warp sums together
constexpr int CHECK_EVERY = 10;  // steps between two checks of the gap, as in the reference
constexpr double ROUNDING = 8 * 2.2204460492503131e-16;  // as in the reference

__device__ inline double infinite() { return __longlong_as_double(0x7ff0000000000000); }
__device__ inline double not_a_number() { return __longlong_as_double(0x7ff8000000000000); }
__device__ inline double square(double x) { return x * x; }
__device__ inline double least(double x, double y) { return y < x ? y : x; }
__device__ inline double positive_part(double x) { return x > 0 ? x : 0; }

// FISTA with a backtracking line search and adaptive restart. Every thread holds the same.
struct Search {
  double curvature, momentum, weight;  // at first tau_a + tau_b, that of a single entry, 1 and 0

  // Of a move: `bend` = tau_a |move 1|^2 + tau_b |move' 1|^2, its square, and its product with the plan's advance.
  __device__ bool accept(double single, double bend, double squares, double advances) {
    const bool good = bend <= curvature * squares;
    if (good) {
      const bool restart = advances < 0;  // the momentum points uphill
      const double next = (1 + sqrt(1 + 4 * square(momentum))) / 2;
      weight = restart ? 0 : (momentum - 1) / next;
      momentum = restart ? 1 : next;
    }
    curvature *= good ? 0.9 : 2;
    curvature = curvature < 1e-3 * single ? 1e-3 * single : curvature;
    return good;
  }
};

// The best plan so far and the largest lower bound. Every thread holds the same.
struct Certificate {
  double value, size, bound, gap, rounding;

  __device__ bool improves(double linear, double of_size, double penalties) {
    if (!(linear + penalties < value)) return false;
    value = linear + penalties;
    size = of_size + penalties;
    return true;
  }
  __device__ void raise(double lower) {
    bound = lower > bound ? lower : bound;
    gap = value - bound <= rounding ? 0 : (value - bound) / size;
  }
};

// values[r] of all lanes reduced -> lane l has that of r = l / (32 / COUNT). An exchange halves what a lane still
// holds.
template <int COUNT, typename Operation>
__device__ __forceinline__ double reduce_rows(double (&values)[COUNT], Operation operation) {
  int offset = 16;
#pragma unroll
  for (int half = COUNT / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = threadIdx.x & offset;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const double sent = upper ? values[k] : values[k + half], kept = upper ? values[k + half] : values[k];
      values[k] = operation(kept, __shfl_xor_sync(ALL_LANES, sent, offset));
    }
  }
  double value = values[0];
#pragma unroll
  for (; offset > 0; offset /= 2) value = operation(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

// Every thread gets the block's sums; `of_warps` is shared memory, [COUNT, 32].
template <int COUNT>
__device__ inline void sum_over_block(double (&values)[COUNT], double* of_warps) {
#pragma unroll
  for (int k = 0; k < COUNT; ++k) values[k] = warp_reduce(values[k], Sum());
  __syncthreads();  // earlier sums have been read
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) of_warps[k * 32 + threadIdx.x / 32] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < COUNT; ++k) {
    values[k] = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) values[k] += of_warps[k * 32 + warp];
  }
}

// What an entry adds to its row's sum and to its column's.
struct Pair {
  double of_row, of_column;
};

}  // namespace

}  // namespace fedkernels::cuda

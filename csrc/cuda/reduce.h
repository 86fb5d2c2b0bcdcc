// Reductions over a warp and over a block. Every thread calls them, and every thread gets the result.
#pragma once

#include "cuda/launch.h"

namespace fedkernels::cuda {

constexpr unsigned ALL_LANES = 0xffffffff;

struct Sum {
  template <typename T>
  __device__ T operator()(T x, T y) const {
    return x + y;
  }
};
// As in the C++ library a NaN is the result only where it comes first.
struct Least {
  template <typename T>
  __device__ T operator()(T x, T y) const {
    return y < x ? y : x;
  }
};
struct Greatest {
  template <typename T>
  __device__ T operator()(T x, T y) const {
    return x < y ? y : x;
  }
};

// The order of the operands does not depend on the lane, so that all get the same bits.
template <typename Operation, typename T>
__device__ inline T warp_reduce(T value, Operation operation) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(ALL_LANES, value, offset);
    value = threadIdx.x & offset ? operation(other, value) : operation(value, other);
  }
  return value;
}

// `of_warps` is shared memory, one entry a warp. The block is one-dimensional.
template <typename Operation, typename T>
__device__ inline T block_reduce(T value, T* of_warps, Operation operation) {
  value = warp_reduce(value, operation);
  __syncthreads();  // an earlier reduction has been read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  T result = of_warps[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) result = operation(result, of_warps[warp]);
  return result;
}

}  // namespace fedkernels::cuda

// The precisions of contrastive passes on the tensor cores.
//
// float32 is rounded to tf32 where torch allows it. A fragment of 8 columns in tf32 lies in shared memory as one of 16
// columns in half precision does: 32 bytes of each row. Only the values, whose fragments are transposed, differ.
#pragma once

#include "cuda/dtype.h"
#include "cuda/launch.h"

namespace fedkernels::cuda {

// What the precisions do in their own way:
//   rounded: an entry as it is multiplied
//   put: a thread's two weights among 8, at columns 2t and 2t + 1
//   load_values: the two fragments b of 16 columns of values, their rows in the order that `put` gives the weights
struct Halves {
  using Entry = uint16_t;
  static __device__ uint16_t rounded(uint16_t bits) { return bits; }
  template <int PITCH>
  static __device__ void load_values(uint32_t (&b)[4], const uint16_t* values, int lane) {
    load_matrices_transposed(b, values + lane % 16 * PITCH + lane / 16 * 8);
  }
};
struct BFloat16 : Halves {
  static __device__ float wide(uint16_t bits) { return bfloat_to_float(bits); }
  static __device__ void put(uint16_t* weights, int t, float first, float second) {
    *reinterpret_cast<uint32_t*>(weights + 2 * t) = pack_bfloat(first, second);
  }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bfloat(sums, a, b);
  }
};
struct Float16 : Halves {
  static __device__ float wide(uint16_t bits) { return half_to_float(bits); }
  static __device__ void put(uint16_t* weights, int t, float first, float second) {
    *reinterpret_cast<uint32_t*>(weights + 2 * t) = pack_half(first, second);
  }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_half(sums, a, b);
  }
};
struct TF32 {
  using Entry = float;
  static __device__ float rounded(float value) { return __uint_as_float(to_tf32(value)); }
  static __device__ float wide(float value) { return rounded(value); }
  // Even columns first: so the values' rows that a warp reads at a time are every other one, from 32 banks.
  static __device__ void put(float* weights, int t, float first, float second) {
    weights[t] = rounded(first);
    weights[t + 4] = rounded(second);
  }
  template <int PITCH>
  static __device__ void load_values(uint32_t (&b)[4], const float* values, int lane) {
    const float* const from = values + lane % 4 * 2 * PITCH + lane / 4;
    b[0] = __float_as_uint(from[0]);
    b[1] = __float_as_uint(from[PITCH]);
    b[2] = __float_as_uint(from[8]);
    b[3] = __float_as_uint(from[PITCH + 8]);
  }
  static __device__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_tf32(sums, a, b);
  }
};

}  // namespace fedkernels::cuda

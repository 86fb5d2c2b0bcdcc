// Linear CKA of pairs: all but the products, which are left to torch's BLAS (fedkernels/internal/linear_cka_cuda.py).
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

constexpr int CKA_MATRICES = 16;  // the most in one call

// Everything lies on the device. `wide`: computed in float64, else in float32, and no input is float64.
struct CKAMatrices {
  Array matrices[CKA_MATRICES];  // contiguous [problems, rows, widths[i]]
  int64_t widths[CKA_MATRICES];
  int64_t count, problems, rows;
  bool centered, wide;
};

// What stands between the products of a pair and its value and gradients; float64 where `wide`, else float32.
// Feature space: own [problems, x_width + y_width, x_width] is [x'x; y'x] and other [problems, y_width, y_width] y'y.
// Then of_x and of_y are such that the gradients are [x y] of_x and [x y] of_y.
// Sample space: own and other [problems, rows, rows] are xx' and yy', and the gradients of_x x and of_y y.
struct CKAProducts {
  const void *own, *other;
  int64_t problems, rows, x_width, y_width;
  bool samples, wide;     // samples: in sample space
  const double* scales;   // [problems, 2], by which x and y were multiplied
  void* values;           // [problems]
  void *of_x, *of_y;      // null: not wanted
};

}  // namespace fedkernels::cuda

// Doubles of device memory that the functions below work in.
extern "C" int64_t cuda_linear_cka_prepare_doubles(const fedkernels::cuda::CKAMatrices* given);
extern "C" int64_t cuda_linear_cka_combine_doubles(const fedkernels::cuda::CKAProducts* products);

// Returns nullptr, or a message that says what went wrong.

// Writes the matrices side by side to z [problems, rows, sum of widths]: each multiplied by a power of two that brings
// its largest entry to [1, 2), and centred if asked. scales [problems, count]: these powers.
extern "C" const char* cuda_linear_cka_prepare(const fedkernels::cuda::CKAMatrices* given, void* z, double* scales,
                                               double* memory, fedkernels::cuda::Stream stream);

extern "C" const char* cuda_linear_cka_combine(const fedkernels::cuda::CKAProducts* products, double* memory,
                                               fedkernels::cuda::Stream stream);

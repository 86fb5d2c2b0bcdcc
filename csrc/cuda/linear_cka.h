// Linear CKA of many small pairs of representations, with the gradients, in one launch.
#pragma once

#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

constexpr int64_t CKA_ROWS = 512, CKA_WIDTH = 128;  // the most

// Everything lies on the device. x [problems, rows, x_width] and y [problems, rows, y_width] are float32 or narrower.
struct CKAProblems {
  Array x, y;
  int64_t problems, rows, x_width, y_width;
  bool centered;
  float* values;                     // [problems]
  float *x_gradients, *y_gradients;  // of the values, shaped as x and y; null: not wanted
};

}  // namespace fedkernels::cuda

// Floats of device memory, aligned to 16 bytes, that cuda_linear_cka works in.
extern "C" int64_t cuda_linear_cka_floats(const fedkernels::cuda::CKAProblems* problems);

// Returns nullptr, or a message that says what went wrong.
extern "C" const char* cuda_linear_cka(const fedkernels::cuda::CKAProblems* problems, float* memory,
                                       fedkernels::cuda::Stream stream);

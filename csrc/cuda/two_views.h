// Two random views of each image of a batch.
#pragma once

#include <stdint.h>

#include "cpu/view_parameters.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

// Pointers are memory of the device.
struct ViewBatch {
  const uint8_t* pixels;  // [images, channels, height, width], with these strides
  int64_t strides[4];
  const int64_t* samples;  // [images]
  int64_t images;
  int channels, height, width;
  PhiloxKey key;
  ViewOptions options;
  void* views[2];  // [images, channels, height, width] or, with channels_last, [images, height, width, channels]
  bool bfloat16, channels_last;
};

constexpr int VIEW_LARGEST_SIDE = 1024;  // pixels

}  // namespace fedkernels::cuda

// Floats of device memory that the kernel works in, and the kernel: one launch. It returns nullptr, or what went wrong.
extern "C" int64_t cuda_two_views_floats(const fedkernels::cuda::ViewBatch* batch);
extern "C" const char* cuda_two_views(const fedkernels::cuda::ViewBatch* batch, float* memory,
                                      fedkernels::cuda::Stream stream);

// One random view of one image.
#pragma once

#include "cpu/isa.h"
#include "cpu/view_parameters.h"

namespace fedkernels {

// An image of uint8: entry [c, y, x] is `pixels[c * channel_stride + y * row_stride + x * column_stride]`.
struct ViewSource {
  const uint8_t* pixels;
  int64_t channel_stride, row_stride, column_stride;
};

struct ViewShape {
  int64_t channels, height, width;
};

// A view is [channels, height, width] or, with channels_last, [height, width, channels], of float32 or bfloat16.
struct ViewTarget {
  void* entries;
  bool bfloat16, channels_last;
};

// Rows are padded to a multiple of the widest register.
constexpr int64_t VIEW_PITCH = 16;

static inline int64_t view_pitch(int64_t width) { return (width + VIEW_PITCH - 1) / VIEW_PITCH * VIEW_PITCH; }

// Floats of workspace: the view, and some rows. (AddressSanitizer needs 16 more behind each of 14 parts.)
static inline int64_t view_workspace(const ViewShape& shape) {
  const int64_t pitch = view_pitch(shape.width), radius = blur_radius(shape.height, shape.width);
  const int64_t row = pitch + 2 * (radius + VIEW_PITCH) + 2 * VIEW_PITCH;
  return (shape.channels == 3 ? 3 : 1) * (shape.height * pitch + 7 * row) + 4 * pitch + radius + 14 * 2 * 16;
}

}  // namespace fedkernels

FEDKERNELS_DECLARE(view_parameters, void, PhiloxKey key, int64_t sample, uint32_t view, const ViewOptions& options,
                   int64_t height, int64_t width, ViewParameters* drawn)

// An operation of the jitter whose strength is 0 is left out, and with other than 1 or 3 channels all of them and gray.
// `workspace` is aligned to 64 bytes.
FEDKERNELS_DECLARE(two_views, void, const ViewSource& source, const ViewShape& shape, const ViewOptions& options,
                   const ViewParameters& drawn, const ViewTarget& target, float* workspace)

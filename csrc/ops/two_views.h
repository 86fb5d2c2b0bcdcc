// The arguments of two_views on the CPU and on CUDA, checked once more.
#pragma once

#include <tuple>
#include <vector>

#include "cpu/two_views.h"
#include "ops/tensors.h"

namespace fedkernels {

using Views = std::tuple<Tensor, Tensor>;

struct ViewArguments {
  ViewShape shape;
  int64_t images;
  ViewOptions options;
  PhiloxKey key;
  const int64_t* samples;

  ViewArguments(const Tensor& pixels, const Tensor& numbers, int64_t seed, int64_t client, int64_t round,
                int64_t epoch, const std::vector<double>& values)
      : shape{}, images(0), options{}, key(key_of_views(seed, client, round, epoch)), samples(nullptr) {
    STD_TORCH_CHECK(pixels.scalar_type() == ScalarType::Byte && pixels.dim() == 4, "images must be uint8 [n, C, H, W]");
    shape = {pixels.size(1), pixels.size(2), pixels.size(3)};
    images = pixels.size(0);
    STD_TORCH_CHECK(shape.channels >= 1 && shape.height >= 2 && shape.width >= 2,
                    "images must have at least 1 channel and sides of at least 2");
    STD_TORCH_CHECK(numbers.scalar_type() == ScalarType::Long && numbers.dim() == 1 && numbers.size(0) == images &&
                        numbers.is_contiguous(),
                    "samples must be contiguous int64 [n]");
    STD_TORCH_CHECK(values.size() == VIEW_OPTION_COUNT, "options must hold the numbers of ViewOptions");
    std::copy(values.begin(), values.end(), reinterpret_cast<double*>(&options));
    samples = images ? static_cast<const int64_t*>(numbers.data_ptr()) : nullptr;
  }

  // The shape that a view's memory has.
  std::vector<int64_t> memory(bool channels_last) const {
    if (channels_last) return {images, shape.height, shape.width, shape.channels};
    return {images, shape.channels, shape.height, shape.width};
  }
};

// [n, H, W, C] -> [n, C, H, W], the same memory
inline Tensor channels_second(const Tensor& view) {
  return torch::stable::transpose(torch::stable::transpose(view, 1, 3), 2, 3);
}

}  // namespace fedkernels

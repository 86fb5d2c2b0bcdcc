#include "cuda/two_views.h"

#include "ops/cuda.h"
#include "ops/two_views.h"

namespace fedkernels {

static Views two_views_cuda(Tensor images, Tensor samples, int64_t seed, int64_t client, int64_t round, int64_t epoch,
                            std::vector<double> options, bool bfloat16, bool channels_last) {
  const ViewArguments arguments(images, samples, seed, client, round, epoch, options);
  STD_TORCH_CHECK(images.is_cuda() && samples.is_cuda() && samples.get_device_index() == images.get_device_index(),
                  "images and samples must be on one CUDA device");
  const ViewShape& shape = arguments.shape;
  STD_TORCH_CHECK(shape.height <= cuda::VIEW_LARGEST_SIDE && shape.width <= cuda::VIEW_LARGEST_SIDE,
                  "images must have sides of at most 1024");
  STD_TORCH_CHECK(shape.channels * shape.height * shape.width < int64_t{1} << 31,  // the kernels' offsets have 32 bits
                  "an image must have fewer than 2^31 values");
  const OnDevice device(images);
  const ScalarType dtype = bfloat16 ? ScalarType::BFloat16 : ScalarType::Float;
  const std::vector<int64_t> memory_shape = arguments.memory(channels_last);
  Tensor first = memory_on(images, memory_shape, dtype), second = memory_on(images, memory_shape, dtype);
  cuda::ViewBatch batch = {};
  batch.pixels = static_cast<const uint8_t*>(data_or_null(images));
  for (int i = 0; i < 4; ++i) batch.strides[i] = images.stride(i);
  batch.samples = arguments.samples;
  batch.images = arguments.images;
  batch.channels = static_cast<int>(shape.channels);
  batch.height = static_cast<int>(shape.height);
  batch.width = static_cast<int>(shape.width);
  batch.key = arguments.key;
  batch.options = arguments.options;
  batch.views[0] = data_or_null(first);
  batch.views[1] = data_or_null(second);
  batch.bfloat16 = bfloat16;
  batch.channels_last = channels_last;
  const Tensor memory = memory_on(images, {cuda_two_views_floats(&batch)}, ScalarType::Float);
  check_cuda(cuda_two_views(&batch, static_cast<float*>(data_or_null(memory)), device.stream()));
  if (channels_last) return {channels_second(first), channels_second(second)};
  return {first, second};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("two_views", TORCH_BOX(&two_views_cuda)); }

}  // namespace fedkernels

#include "ops/two_views.h"

#include "ops/threads.h"

namespace fedkernels {

static Views two_views_cpu(Tensor images, Tensor samples, int64_t seed, int64_t client, int64_t round, int64_t epoch,
                           std::vector<double> options, bool bfloat16, bool channels_last) {
  STD_TORCH_CHECK(images.is_cpu() && samples.is_cpu(), "images and samples must be on the CPU");
  const ViewArguments arguments(images, samples, seed, client, round, epoch, options);
  const ViewShape& shape = arguments.shape;
  const ScalarType dtype = bfloat16 ? ScalarType::BFloat16 : ScalarType::Float;
  Tensor views[2];
  char* entries[2];
  for (int view = 0; view < 2; ++view) {
    views[view] = torch::stable::empty(arguments.memory(channels_last), dtype);
    entries[view] = static_cast<char*>(data_or_null(views[view]));
  }
  const int64_t bytes = shape.channels * shape.height * shape.width * (bfloat16 ? 2 : 4);
  const uint8_t* const pixels = static_cast<const uint8_t*>(data_or_null(images));

  const auto draw = FEDKERNELS_BEST(view_parameters);
  const auto kernel = FEDKERNELS_BEST(two_views);
  const int64_t workers = std::min<int64_t>(arguments.images, torch_threads().workers);
  const int64_t each = (view_workspace(shape) * sizeof(float) + 63) / 64 * 64;
  const auto workspace = kernel_memory(workers * each);
  for_each_task(arguments.images, workers, [&](int64_t i, int64_t worker) {
    const ViewSource source = {pixels + i * images.stride(0), images.stride(1), images.stride(2), images.stride(3)};
    for (uint32_t view = 0; view < 2; ++view) {
      ViewParameters drawn;
      draw(arguments.key, arguments.samples[i], view, arguments.options, shape.height, shape.width, &drawn);
      kernel(source, shape, arguments.options, drawn, {entries[view] + i * bytes, bfloat16, channels_last},
             reinterpret_cast<float*>(workspace.get() + worker * each));
    }
  });
  if (channels_last) return {channels_second(views[0]), channels_second(views[1])};
  return {views[0], views[1]};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("two_views", TORCH_BOX(&two_views_cpu)); }

}  // namespace fedkernels

// One block a view (each channel of it, unless there are three), from the draws to the last write. The resized image
// lies in shared memory where it fits, else in device memory; blocks then take one view after the other.
#include "cuda/two_views.h"

#include "cuda/dtype.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int MOST_RADIUS = 64;  // of the blur: a twentieth of VIEW_LARGEST_SIDE, and more
constexpr int BLOCKS_WANTED = 3;  // on a multiprocessor: with more, registers spill
constexpr int64_t MOST_MEMORY = 64 << 20;  // floats of device memory for all blocks
constexpr int TO_GRAY = HUE + 1;

struct Step {
  int operation;  // a ViewOperation or TO_GRAY
  float factor, offset;
};

// What is done with one image.
struct Plan {
  ViewParameters drawn;
  Step steps[5];
  int count;  // of steps
  int early;  // of these, those before the contrast, which needs the mean of the whole image
  int radius;  // of the blur; 0: none
};

template <int C>
__device__ inline void plan_view(const ViewBatch& batch, int64_t image, int view, Plan* plan) {
  plan->drawn = draw_view(batch.key, batch.samples[image], view, batch.options, batch.height, batch.width);
  const ViewParameters& drawn = plan->drawn;
  int count = 0, early = -1;
  for (int i = 0; i < 4 && batch.channels == C; ++i) {
    const int operation = drawn.order[i];
    if (!drawn.jitter || batch.options.strengths[operation] == 0 || (C == 1 && operation > CONTRAST)) continue;
    if (operation == CONTRAST) early = count;
    plan->steps[count++] = {operation, drawn.factors[operation], 0};
  }
  if (drawn.grayscale && C == 3) plan->steps[count++] = {TO_GRAY, 0, 0};
  plan->count = count;
  plan->early = early < 0 ? count : early;
}

__device__ inline float clamp_to_one(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }

template <int C>
__device__ inline float luma(const float (&pixel)[C]) {
  if constexpr (C == 1) return pixel[0];
  else return pixel[0] * 0.2989f + pixel[1] * 0.587f + pixel[2] * 0.114f;
}

// Turns the hue of HSV, as the reference's formula does.
__device__ inline void turn_hue(float (&pixel)[3], float turns) {
  const float red = pixel[0], green = pixel[1], blue = pixel[2];
  const float value = fmaxf(fmaxf(red, green), blue), chroma = value - fminf(fminf(red, green), blue);
  const float scale = 1 / fmaxf(chroma, 1e-12f);
  float hue = value == red     ? (green - blue) * scale
              : value == green ? (blue - red) * scale + 2
                               : (red - green) * scale + 4;
  hue += 6 * turns;  // -4 to 8
  hue = hue < 0 ? hue + 6 : hue;
  hue = hue >= 6 ? hue - 6 : hue;
#pragma unroll
  for (int c = 0; c < 3; ++c) {
    float k = hue + (5 - 2 * c);
    k = k >= 6 ? k - 6 : k;
    pixel[c] = value - chroma * clamp_to_one(fminf(k, 4 - k));
  }
}

template <int C>
__device__ inline void apply(const Step* steps, int count, float (&pixel)[C]) {
  for (int i = 0; i < count; ++i) {
    const Step step = steps[i];
    switch (step.operation) {
      case BRIGHTNESS:
      case CONTRAST:
#pragma unroll
        for (int c = 0; c < C; ++c) pixel[c] = clamp_to_one(pixel[c] * step.factor + step.offset);
        break;
      case SATURATION: {
        const float gray = luma(pixel) * (1 - step.factor);
#pragma unroll
        for (int c = 0; c < C; ++c) pixel[c] = clamp_to_one(pixel[c] * step.factor + gray);
        break;
      }
      case HUE:
        if constexpr (C == 3) turn_hue(pixel, step.factor);
        break;
      default: {
        const float gray = luma(pixel);
#pragma unroll
        for (int c = 0; c < C; ++c) pixel[c] = gray;
      }
    }
  }
}

// Between which two pixels each pixel of a resized side lies, and where between them.
struct Positions {
  int* first;     // [size]: the first of the two, in pixels of the source
  float* weight;  // [size]: of the second

  __device__ void fill(int size, int64_t start, int64_t length, bool flip) const {
    for (int i = threadIdx.x; i < size; i += THREADS) {
      const int from = flip ? size - 1 - i : i;
      double at = (from + 0.5) * (static_cast<double>(length) / size) - 0.5;
      at = at < 0 ? 0 : at > length - 1 ? length - 1 : at;
      const int neighbour = static_cast<int>(at);
      first[i] = static_cast<int>(start) + neighbour;
      weight[i] = static_cast<float>(at - neighbour);
    }
  }
};

__device__ inline int reflected(int index, int size) {
  index = index < 0 ? -index : index;
  return index < size ? index : 2 * size - 2 - index;
}

__device__ inline void store(float* to, float value) { *to = value; }
__device__ inline void store(BFloat* to, float value) { to->bits = float_to_bfloat(value); }

// A block's memory beside the plane: positions, the blur's weights, one row a warp.
inline size_t tables_bytes(int height, int width) {
  return 4 * (2 * static_cast<size_t>(height + width) + 3 * (MOST_RADIUS + 1) + WARPS * static_cast<size_t>(width) + 1);
}

inline size_t plane_floats(const ViewBatch& batch) {
  return static_cast<size_t>(batch.channels == 3 ? 3 : 1) * batch.height * batch.width;
}

template <int C, typename Entry>
__global__ void __launch_bounds__(THREADS, BLOCKS_WANTED) two_views_kernel(ViewBatch batch, int most_radius,
                                                                                   float* memory) {
  SHARED(plan, Plan);
  SHARED(of_warps, double[WARPS]);
  const int height = batch.height, width = batch.width, area = height * width;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double* const exponentials = dynamic_shared<double>();
  float* const weights = reinterpret_cast<float*>(exponentials + MOST_RADIUS + 1);
  const Positions rows = {reinterpret_cast<int*>(weights + MOST_RADIUS + 1), weights + MOST_RADIUS + 1 + height};
  const Positions columns = {reinterpret_cast<int*>(rows.weight + height), rows.weight + height + width};
  float* const row_of_warp = columns.weight + width + warp * width;
  float* const plane = memory ? memory + static_cast<int64_t>(blockIdx.x) * C * area
                              : columns.weight + width + WARPS * width;  // [C, height, width]

  const int parts = batch.channels / C;
  for (int64_t index = blockIdx.x; index < 2 * batch.images * parts; index += gridDim.x) {
    const int64_t image = index / 2 / parts;
    const int part = static_cast<int>(index / 2 % parts), view = static_cast<int>(index % 2);
    __syncthreads();  // the view before is written
    if (threadIdx.x == 0) plan_view<C>(batch, image, view, &plan);
    __syncthreads();
    const ViewParameters& drawn = plan.drawn;
    rows.fill(height, drawn.top, drawn.height, false);
    columns.fill(width, drawn.left, drawn.width, drawn.flip);
    if (static_cast<int>(threadIdx.x) <= most_radius) exponentials[threadIdx.x] = blur_weight(threadIdx.x, drawn.sigma);
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 1;
      for (int k = 1; k <= most_radius; ++k) total += 2 * exponentials[k];
      int radius = 0;
      for (; radius <= most_radius; ++radius) {
        weights[radius] = static_cast<float>(exponentials[radius] / total);
        if (weights[radius] < SMALLEST_BLUR_WEIGHT) break;
      }
      plan.radius = drawn.blur ? radius - 1 : 0;
    }
    __syncthreads();
    const int radius = plan.radius;
    const bool contrast = plan.early < plan.count;

    Entry* const target = static_cast<Entry*>(batch.views[view]) + image * batch.channels * area +
                          part * (batch.channels_last ? 1 : area);
    const auto finish = [&](int pixel, const float (&values)[C]) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const float value = drawn.solarize && values[c] >= 0.5f ? 1 - values[c] : values[c];
        store(target + (batch.channels_last ? pixel * batch.channels + c : c * area + pixel), value * 4 - 2);
      }
    };
    const auto keep = [&](int pixel, const float (&values)[C]) {
#pragma unroll
      for (int c = 0; c < C; ++c) plane[c * area + pixel] = values[c];
    };

    // Resize, and what comes before the contrast.
    const uint8_t* const source = batch.pixels + image * batch.strides[0] + part * batch.strides[1];
    const int64_t row_end = drawn.top + drawn.height - 1, column_end = drawn.left + drawn.width - 1;
    float sum = 0;
    for (int pixel = threadIdx.x; pixel < area; pixel += THREADS) {
      const int y = pixel / width, x = pixel % width;
      const int64_t top = rows.first[y], left = columns.first[x];
      const int64_t down = top < row_end ? batch.strides[2] : 0, right = left < column_end ? batch.strides[3] : 0;
      const float row_weight = rows.weight[y], column_weight = columns.weight[x];
      float values[C];
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const uint8_t* const at = source + c * batch.strides[1] + top * batch.strides[2] + left * batch.strides[3];
        const float above = at[0] + (static_cast<float>(at[right]) - at[0]) * column_weight;
        const float below = at[down] + (static_cast<float>(at[down + right]) - at[down]) * column_weight;
        values[c] = (above + (below - above) * row_weight) * (1 / 255.0f);
      }
      apply(plan.steps, plan.early, values);
      sum += luma(values);
      if (contrast || radius) keep(pixel, values);
      else finish(pixel, values);
    }

    if (contrast) {
      const double total = block_reduce(static_cast<double>(sum), of_warps, Sum{});
      if (threadIdx.x == 0) {
        Step& step = plan.steps[plan.early];
        step.offset = static_cast<float>(total / area) * (1 - step.factor);
      }
      __syncthreads();
      for (int pixel = threadIdx.x; pixel < area; pixel += THREADS) {  // each thread its own: nothing to wait for
        float values[C];
#pragma unroll
        for (int c = 0; c < C; ++c) values[c] = plane[c * area + pixel];
        apply(plan.steps + plan.early, plan.count - plan.early, values);
        if (radius) keep(pixel, values);
        else finish(pixel, values);
      }
    }

    if (!radius) continue;
    __syncthreads();
    for (int row = warp; row < C * height; row += WARPS) {
      float* const entries = plane + row * width;
      for (int x = lane; x < width; x += 32) row_of_warp[x] = entries[x];
      __syncwarp();
      for (int x = lane; x < width; x += 32) {
        float blurred = row_of_warp[x] * weights[0];
        for (int k = 1; k <= radius; ++k) {
          blurred += (row_of_warp[reflected(x - k, width)] + row_of_warp[reflected(x + k, width)]) * weights[k];
        }
        entries[x] = blurred;
      }
      __syncwarp();
    }
    __syncthreads();
    for (int pixel = threadIdx.x; pixel < area; pixel += THREADS) {
      const int y = pixel / width, x = pixel % width;
      float values[C];
#pragma unroll
      for (int c = 0; c < C; ++c) values[c] = plane[c * area + pixel] * weights[0];
      for (int k = 1; k <= radius; ++k) {
        const int above = reflected(y - k, height) * width + x, below = reflected(y + k, height) * width + x;
#pragma unroll
        for (int c = 0; c < C; ++c) values[c] += (plane[c * area + above] + plane[c * area + below]) * weights[k];
      }
      finish(pixel, values);
    }
  }
}

struct Layout {
  unsigned blocks;
  size_t shared;  // bytes
  int64_t memory;  // floats of device memory for all blocks
};

inline Layout layout_of(const ViewBatch& batch) {
  const size_t tables = tables_bytes(batch.height, batch.width), plane = 4 * plane_floats(batch);
  const int64_t views = 2 * batch.images * (batch.channels == 3 ? 1 : batch.channels);
  // Of blocks that have a multiprocessor to themselves a part would wait for memory with nothing to do meanwhile.
  if (2 * (tables + plane) <= shared_limit() - (2 << 10)) return {static_cast<unsigned>(views), tables + plane, 0};
  const int64_t own = static_cast<int64_t>(plane_floats(batch));
  int64_t blocks = static_cast<int64_t>(BLOCKS_WANTED) * multiprocessors();
  if (blocks > MOST_MEMORY / own) blocks = MOST_MEMORY / own;
  if (blocks > views) blocks = views;
  return {static_cast<unsigned>(blocks), tables, blocks * own};
}

template <int C>
const char* launch_for(const ViewBatch& batch, const Layout& layout, float* memory, Stream stream) {
  const int radius = static_cast<int>(blur_radius(batch.height, batch.width));
  const Shape shape = {layout.blocks, THREADS, layout.shared};
  if (batch.bfloat16) return launch(shape, stream, two_views_kernel<C, BFloat>, batch, radius, memory);
  return launch(shape, stream, two_views_kernel<C, float>, batch, radius, memory);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" int64_t cuda_two_views_floats(const fedkernels::cuda::ViewBatch* batch) {
  return fedkernels::cuda::layout_of(*batch).memory;
}

extern "C" const char* cuda_two_views(const fedkernels::cuda::ViewBatch* batch, float* memory,
                                      fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  if (batch->height > VIEW_LARGEST_SIDE || batch->width > VIEW_LARGEST_SIDE) return "the images are too large";
  if (batch->images == 0) return nullptr;
  const Layout layout = layout_of(*batch);
  float* const own = layout.memory ? memory : nullptr;
  return (batch->channels == 3 ? launch_for<3> : launch_for<1>)(*batch, layout, own, stream);
}

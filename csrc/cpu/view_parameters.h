// What is drawn for a random view of an image, to the bit as fedkernels/reference/two_views.py draws it. For CPUs and
// GPUs: all arithmetic is float64 by +, -, *, / and square roots, none of them fused, so that everybody gets the same.
//
// Whoever includes this compiles without contraction of products and sums.
#pragma once

#include "cpu/philox.h"

namespace fedkernels {

// fedkernels.ViewOptions.numbers()
struct ViewOptions {
  double crop_scale[2];
  double crop_ratio[2], log_crop_ratio[2];
  double flip;
  double strengths[4];  // brightness, contrast, saturation, hue
  double jitter_probability, grayscale, blur;
  double blur_sigma[2];
  double solarize;
};
constexpr int VIEW_OPTION_COUNT = sizeof(ViewOptions) / sizeof(double);

enum ViewOperation { BRIGHTNESS, CONTRAST, SATURATION, HUE };

struct ViewParameters {
  int64_t top, left, height, width;  // of the crop, in pixels
  bool flip, jitter, grayscale, blur, solarize;
  unsigned char order[4];  // a permutation of ViewOperation
  float factors[4];        // by ViewOperation; of the hue the shift in turns
  float sigma;             // of the blur, in pixels
};

#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
__device__ static inline double exact_product(double a, double b) { return __dmul_rn(a, b); }
__device__ static inline double exact_sum(double a, double b) { return __dadd_rn(a, b); }
__device__ static inline double exact_root(double a) { return __dsqrt_rn(a); }
#else
FEDKERNELS_HOST_DEVICE static inline double exact_product(double a, double b) { return a * b; }
FEDKERNELS_HOST_DEVICE static inline double exact_sum(double a, double b) { return a + b; }
FEDKERNELS_HOST_DEVICE static inline double exact_root(double a) { return __builtin_sqrt(a); }
#endif

// To the nearest integer, ties to even, for |x| < 2^51.
FEDKERNELS_HOST_DEVICE static inline double nearest(double x) { return exact_sum(exact_sum(x, 0x1.8p52), -0x1.8p52); }

// The exponential for |x| < 700 to about 1e-15.
FEDKERNELS_HOST_DEVICE static inline double exp_of_number(double x) {
  const double coefficients[14] = {1.0,           1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,
                                   1.0 / 120,     1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                                   1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
  const double n = nearest(exact_product(x, 1.4426950408889634));
  const double r = exact_sum(exact_sum(x, -exact_product(n, 6.93147180369123816490e-01)),
                             -exact_product(n, 1.90821492927058770002e-10));
  double power = coefficients[13];
  for (int k = 12; k >= 0; --k) power = exact_sum(exact_product(power, r), coefficients[k]);
  union {
    int64_t bits;
    double value;
  } two_to_n;
  two_to_n.bits = ((int64_t)n + 1023) << 52;
  return power * two_to_n.value;
}

// The blur's kernel has twice this and one entries: the odd number nearest to a tenth of the shorter side, at least 3.
FEDKERNELS_HOST_DEVICE static inline int64_t blur_radius(int64_t height, int64_t width) {
  const double tenth = (double)(height < width ? height : width) / 10;
  const int64_t radius = (int64_t)nearest((tenth - 1) / 2);
  return radius < 1 ? 1 : radius;
}

// Entry k of that kernel before it is divided by the sum of all.
FEDKERNELS_HOST_DEVICE static inline double blur_weight(int64_t k, double sigma) {
  const double exponent = -0.5 * ((double)k / sigma) * ((double)k / sigma);
  return exponent < -100 ? 0 : exp_of_number(exponent);
}

// Entries below this are left out, with which float32 sums are the same.
constexpr float SMALLEST_BLUR_WEIGHT = 0x1p-30f;

// The key of all views of one epoch of a client: itself a random number.
FEDKERNELS_HOST_DEVICE static inline PhiloxKey key_of_views(int64_t seed, int64_t client, int64_t round,
                                                            int64_t epoch) {
  const PhiloxKey key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}};
  const PhiloxWords words = philox({{(uint32_t)client, (uint32_t)round, (uint32_t)epoch, 0}}, key);
  return {{words.words[0], words.words[1]}};
}

// Where the random words of one view of one sample are.
struct ViewWords {
  PhiloxKey key;
  int64_t sample;
  uint32_t view;
};

// Words 4 block to 4 block + 3 as numbers from 0 to 1, without 1.
FEDKERNELS_HOST_DEVICE static inline void draw_four(const ViewWords& of, uint32_t block, double (&numbers)[4]) {
  // fault: (uint32_t)(of.sample >> 32) -> 0
  const PhiloxWords drawn = philox({{(uint32_t)of.sample, (uint32_t)(of.sample >> 32), of.view, block}}, of.key);
  for (int i = 0; i < 4; ++i) numbers[i] = drawn.words[i] * 0x1p-32;
}

FEDKERNELS_HOST_DEVICE static inline double between(double low, double high, double uniform) {
  return exact_sum(low, exact_product(exact_sum(high, -low), uniform));
}

FEDKERNELS_HOST_DEVICE static inline double within(double low, double high, double x) {
  return x < low ? low : x > high ? high : x;
}

// As torchvision's RandomResizedCrop: the first of ten shapes that fits, else the largest central one whose ratio is
// allowed. `top` and `left` are uniform numbers.
FEDKERNELS_HOST_DEVICE static inline void draw_crop(const ViewWords& words, const ViewOptions& options, int64_t height,
                                                    int64_t width, double top, double left, ViewParameters* drawn) {
  double numbers[4];
  for (uint32_t attempt = 0; attempt < 10; ++attempt) {
    if (attempt % 2 == 0) draw_four(words, 4 + attempt / 2, numbers);
    const double u = numbers[attempt % 2 * 2], v = numbers[attempt % 2 * 2 + 1];
    const double area =
        exact_product((double)(height * width), between(options.crop_scale[0], options.crop_scale[1], u));
    const double ratio = exp_of_number(between(options.log_crop_ratio[0], options.log_crop_ratio[1], v));
    const double box_width = nearest(exact_root(exact_product(area, ratio)));
    const double box_height = nearest(exact_root(area / ratio));
    if (box_width > 0 && box_width <= width && box_height > 0 && box_height <= height) {
      drawn->width = (int64_t)box_width;
      drawn->height = (int64_t)box_height;
      drawn->top = (int64_t)(top * (double)(height - drawn->height + 1));
      drawn->left = (int64_t)(left * (double)(width - drawn->width + 1));
      return;
    }
  }
  const double ratio = within(options.crop_ratio[0], options.crop_ratio[1], (double)width / (double)height);
  drawn->width = (int64_t)within(1, width, nearest(exact_product(height, ratio)));
  drawn->height = (int64_t)within(1, height, nearest(width / ratio));
  drawn->top = (height - drawn->height) / 2;
  drawn->left = (width - drawn->width) / 2;
}

// The parameters of view 0 or 1 of an image of this size.
FEDKERNELS_HOST_DEVICE static inline ViewParameters draw_view(PhiloxKey key, int64_t sample, uint32_t view,
                                                              const ViewOptions& options, int64_t height,
                                                              int64_t width) {
  const ViewWords words = {key, sample, view};
  ViewParameters drawn;
  double numbers[4];
  draw_four(words, 0, numbers);
  for (int operation = 0; operation < 4; ++operation) {
    const double strength = options.strengths[operation];
    const double low = operation == HUE ? -strength : strength < 1 ? exact_sum(1, -strength) : 0;
    const double high = operation == HUE ? strength : exact_sum(1, strength);
    drawn.factors[operation] = (float)between(low, high, numbers[operation]);
  }
  draw_four(words, 1, numbers);
  // The permutations in lexicographic order: which of the operations that are left comes next.
  const int order = (int)(numbers[0] * 24);
  const int choices[4] = {order / 6, order % 6 / 2, order % 2, 0};
  unsigned left = 0x3210;  // four bits each
  for (int step = 0; step < 4; ++step) {
    const int shift = 4 * choices[step];
    drawn.order[step] = (unsigned char)(left >> shift & 15);
    left = (left & ((1u << shift) - 1)) | (left >> (shift + 4) << shift);
  }
  drawn.jitter = numbers[1] < options.jitter_probability;
  drawn.flip = numbers[2] < options.flip;
  drawn.grayscale = numbers[3] < options.grayscale;
  draw_four(words, 2, numbers);
  drawn.blur = numbers[0] < options.blur;
  drawn.sigma = (float)between(options.blur_sigma[0], options.blur_sigma[1], numbers[1]);
  drawn.solarize = numbers[2] < options.solarize;
  const double top = numbers[3];
  draw_four(words, 3, numbers);
  draw_crop(words, options, height, width, top, numbers[0], &drawn);
  return drawn;
}

}  // namespace fedkernels

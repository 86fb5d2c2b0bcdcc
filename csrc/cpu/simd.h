// Vectors of doubles as wide as the instruction set, and the dtypes that are read and written.
#pragma once

#include <stddef.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cpu/dtype.h"

namespace fedkernels::FEDKERNELS_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 8;
#elif defined(__AVX__)
constexpr int LANES = 4;
#else
constexpr int LANES = 2;
#endif

typedef double Vec __attribute__((vector_size(LANES * 8)));
typedef double VecAnywhere __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

static inline Vec load(const double* p) { return *(const VecAnywhere*)p; }
static inline void store(double* p, Vec v) { *(VecAnywhere*)p = v; }
static inline Vec splat(double x) { return x - Vec{}; }
static inline double sum(Vec v) {
  double total = 0;
  for (int lane = 0; lane < LANES; ++lane) total += v[lane];
  return total;
}

// Is a lane below 0, or -0?
static inline bool any_sign(Vec v) {
#if defined(__AVX512DQ__)
  return _mm512_movepi64_mask((__m512i)v) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_pd((__m256d)v) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_pd((__m128d)v) != 0;
#else
  bool any = false;
  for (int lane = 0; lane < LANES; ++lane) any |= __builtin_signbit(v[lane]) != 0;
  return any;
#endif
}

static inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, exponent = half & 0x7c00;
  uint32_t bits = magnitude + 0x38000000;                         // the exponent's bias
  bits = exponent == 0x7c00 ? magnitude | 0x7f800000 : bits;      // infinity and NaN
  bits = exponent == 0 ? magnitude + 0x38800000 : bits;           // 2^-14 more than a subnormal half:
  float value;                                                    // a subnormal float the processor may take for 0
  __builtin_memcpy(&value, &bits, 4);
  value -= exponent == 0 ? 0x1p-14f : 0.0f;
  return half & 0x8000 ? -value : value;
}

static inline float bfloat_to_float(uint16_t bfloat) {
  uint32_t bits = (uint32_t)bfloat << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
}

static inline uint16_t float_to_half(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);   // NaN
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and above round to infinity
  if (bits < 0x38800000) {  // a subnormal half: adding 1/2 leaves its bits at the end of the sum
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    __builtin_memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + ((bits >> 13) & 1);  // rebias the exponent, round to the nearest, ties to even
  return (uint16_t)(sign | (bits >> 13));
}

// `count` entries of an array, as T.
template <class T>
static inline void widen(T* out, const Array& array, int64_t start, int64_t count) {
  switch (array.dtype) {
    case DType::f64:
      for (int64_t i = 0; i < count; ++i) out[i] = (T)((const double*)array.data)[start + i];
      break;
    case DType::f32:
      for (int64_t i = 0; i < count; ++i) out[i] = ((const float*)array.data)[start + i];
      break;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) out[i] = bfloat_to_float(((const uint16_t*)array.data)[start + i]);
      break;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(((const uint16_t*)array.data)[start + i]);
      break;
  }
}

// Half precision is rounded by way of float32, as PyTorch rounds it.
static inline void write(void* target, DType dtype, int64_t start, const double* values, int64_t count) {
  switch (dtype) {
    case DType::f64:
      __builtin_memcpy((double*)target + start, values, count * 8);
      break;
    case DType::f32:
      for (int64_t i = 0; i < count; ++i) ((float*)target)[start + i] = (float)values[i];
      break;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) ((uint16_t*)target)[start + i] = float_to_bfloat((float)values[i]);
      break;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) ((uint16_t*)target)[start + i] = float_to_half((float)values[i]);
      break;
  }
}

static inline int64_t bytes_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// For functions that only fetch: GCC takes those for functions without effect and drops their calls if not inlined
// early.
#define FEDKERNELS_INLINE __attribute__((always_inline)) inline

// The processor sees too short a run of each of the many arrays to fetch ahead by itself.
static FEDKERNELS_INLINE void prefetch(const Array& array, int64_t start, int64_t count) {
  const int64_t width = bytes_of(array.dtype);
  const char* first = (const char*)array.data + start * width;
  for (int64_t byte = 0; byte < count * width; byte += 64) __builtin_prefetch(first + byte);
}

}  // namespace fedkernels::FEDKERNELS_ISA

// Entries of the operators' inputs in the precision that a kernel computes in.
#pragma once

#include "cpu/dtype.h"
#include "cuda/ptx.h"

namespace fedkernels::cuda {

// Half precision as it lies in memory.
struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

__device__ inline float widen(Half value) { return half_to_float(value.bits); }
__device__ inline float widen(BFloat value) { return bfloat_to_float(value.bits); }
__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }

// Half precision is rounded by way of float32, as PyTorch rounds it.
__device__ inline void narrow(double value, Half* to) { to->bits = float_to_half(static_cast<float>(value)); }
__device__ inline void narrow(double value, BFloat* to) { to->bits = float_to_bfloat(static_cast<float>(value)); }
__device__ inline void narrow(double value, float* to) { *to = static_cast<float>(value); }
__device__ inline void narrow(double value, double* to) { *to = value; }

// Four neighbours, read and written by one instruction (float64: by two) where they lie at a multiple of their size.
template <typename T>
struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) Four {
  T values[4];
};

// values[i] = source[start + i] for i < count <= 4, the others are 0.
template <typename Value, typename T>
__device__ inline void read_four(Value (&values)[4], const T* source, int64_t start, int count) {
  const T* from = source + start;
  if (count >= 4 && reinterpret_cast<uintptr_t>(from) % alignof(Four<T>) == 0) {
    const Four<T> four = *reinterpret_cast<const Four<T>*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = widen(four.values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = i < count ? widen(from[i]) : Value(0);
  }
}

template <typename Value>
__device__ inline void read_four(Value (&values)[4], const Array& source, int64_t start, int count) {
  switch (source.dtype) {
    case DType::f64:
      return read_four(values, static_cast<const double*>(source.data), start, count);
    case DType::f32:
      return read_four(values, static_cast<const float*>(source.data), start, count);
    case DType::bf16:
      return read_four(values, static_cast<const BFloat*>(source.data), start, count);
    case DType::f16:
      return read_four(values, static_cast<const Half*>(source.data), start, count);
  }
}

// target[start + i] = values[i] for i < count <= 4.
template <typename T>
__device__ inline void write_four(T* target, int64_t start, const double (&values)[4], int count) {
  T* const to = target + start;
  if (count >= 4 && reinterpret_cast<uintptr_t>(to) % alignof(Four<T>) == 0) {
    Four<T> four;
#pragma unroll
    for (int i = 0; i < 4; ++i) narrow(values[i], &four.values[i]);
    *reinterpret_cast<Four<T>*>(to) = four;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) narrow(values[i], to + i);
    }
  }
}

__device__ inline void write_four(const Array& target, int64_t start, const double (&values)[4], int count) {
  switch (target.dtype) {
    case DType::f64:
      return write_four(static_cast<double*>(target.data), start, values, count);
    case DType::f32:
      return write_four(static_cast<float*>(target.data), start, values, count);
    case DType::bf16:
      return write_four(static_cast<BFloat*>(target.data), start, values, count);
    case DType::f16:
      return write_four(static_cast<Half*>(target.data), start, values, count);
  }
}

__device__ inline double read_one(const Array& source, int64_t index) {
  switch (source.dtype) {
    case DType::f64:
      return static_cast<const double*>(source.data)[index];
    case DType::f32:
      return static_cast<const float*>(source.data)[index];
    case DType::bf16:
      return widen(static_cast<const BFloat*>(source.data)[index]);
    default:
      return widen(static_cast<const Half*>(source.data)[index]);
  }
}

__device__ inline void write_one(const Array& target, int64_t index, double value) {
  switch (target.dtype) {
    case DType::f64:
      return narrow(value, static_cast<double*>(target.data) + index);
    case DType::f32:
      return narrow(value, static_cast<float*>(target.data) + index);
    case DType::bf16:
      return narrow(value, static_cast<BFloat*>(target.data) + index);
    case DType::f16:
      return narrow(value, static_cast<Half*>(target.data) + index);
  }
}

}  // namespace fedkernels::cuda

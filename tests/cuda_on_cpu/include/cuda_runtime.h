// Stands in for NVIDIA's header of this name, so that g++ compiles the kernels of csrc/cuda as they are and runs them
// on the CPU. See README.md in the folder above.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

#define __global__ __attribute__((unused))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ use_SHARED_or_dynamic_shared_of_cuda_launch_h

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUDA_ON_CPU_VECTOR(type, name)                                                          \
  struct alignas(2 * sizeof(type)) name##2 {                                                    \
    type x, y;                                                                                  \
  };                                                                                            \
  struct alignas(sizeof(type) * 4 > 16 ? 16 : sizeof(type) * 4) name##4 {                       \
    type x, y, z, w;                                                                            \
  };                                                                                            \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                              \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUDA_ON_CPU_VECTOR(float, float)
CUDA_ON_CPU_VECTOR(double, double)
CUDA_ON_CPU_VECTOR(int, int)
CUDA_ON_CPU_VECTOR(unsigned, uint)
CUDA_ON_CPU_VECTOR(unsigned short, ushort)
#undef CUDA_ON_CPU_VECTOR

typedef struct CUstream_st* cudaStream_t;

namespace cuda_on_cpu {

struct Thread {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern Thread* current;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Every lane of `mask` hands in `bytes` <= 64 bytes under the name of the operation; -> what lane i handed in lies at
// 64 * i, once all of them have come. It holds until the lane's next exchange.
const char* exchange(unsigned mask, const char* operation, const void* value, size_t bytes);

// Waits until all threads of the block have come, with the number of those that brought true.
int barrier(bool vote = false);

inline unsigned lane() {
  const Thread& self = *current;
  return (self.thread.x + self.block_size.x * (self.thread.y + self.block_size.y * self.thread.z)) % 32;
}

template <typename T>
T of_lane(const char* slots, unsigned lane) {
  T value;
  memcpy(&value, slots + 64 * lane, sizeof(T));
  return value;
}

template <typename T>
T shuffle(unsigned mask, const char* operation, T value, int source, int width) {
  if (width <= 0 || width > 32 || (width & (width - 1))) fail("%s: the width is %d", operation, width);
  const char* slots = exchange(mask, operation, &value, sizeof(T));
  if (!(mask >> source & 1)) fail("%s: lane %d is not in the mask %#x", operation, source, mask);
  return of_lane<T>(slots, source);
}

}  // namespace cuda_on_cpu

#define threadIdx (cuda_on_cpu::current->thread)
#define blockIdx (cuda_on_cpu::current->block)
#define blockDim (cuda_on_cpu::current->block_size)
#define gridDim (cuda_on_cpu::current->grid_size)
constexpr int warpSize = 32;

inline void __syncthreads() { cuda_on_cpu::barrier(); }
inline int __syncthreads_count(int vote) { return cuda_on_cpu::barrier(vote != 0); }
inline int __syncthreads_or(int vote) { return cuda_on_cpu::barrier(vote != 0) > 0; }
inline int __syncthreads_and(int vote) { return cuda_on_cpu::barrier(vote == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffff) {
  const char nothing = 0;
  cuda_on_cpu::exchange(mask, "__syncwarp", &nothing, 1);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = cuda_on_cpu::lane() & ~(width - 1);
  return cuda_on_cpu::shuffle(mask, "__shfl_sync", value, first + (source & (width - 1)), width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = cuda_on_cpu::lane(), source = lane ^ bits;
  const bool inside = (source & ~(width - 1)) <= (lane & ~(width - 1));
  return cuda_on_cpu::shuffle(mask, "__shfl_xor_sync", value, inside ? source : lane, width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::lane(), source = lane + delta;
  const bool inside = (lane & (width - 1)) + (int)delta < width;
  return cuda_on_cpu::shuffle(mask, "__shfl_down_sync", value, inside ? source : lane, width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_on_cpu::lane(), source = lane - (int)delta;
  const bool inside = (lane & (width - 1)) >= (int)delta;
  return cuda_on_cpu::shuffle(mask, "__shfl_up_sync", value, inside ? source : lane, width);
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
  const char mine = vote != 0;
  const char* slots = cuda_on_cpu::exchange(mask, "__ballot_sync", &mine, 1);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1 && slots[64 * lane]) votes |= 1u << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask; }

// Threads change places at barriers and exchanges only, so that a plain read and write is atomic.
#define CUDA_ON_CPU_ATOMIC(name, type, expression)            \
  inline type name(type* address, type value) {               \
    const type old = *address;                                \
    *address = expression;                                    \
    return old;                                               \
  }
CUDA_ON_CPU_ATOMIC(atomicAdd, int, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, unsigned, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, unsigned long long, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, float, old + value)
CUDA_ON_CPU_ATOMIC(atomicAdd, double, old + value)
CUDA_ON_CPU_ATOMIC(atomicMax, int, std::max(old, value))
CUDA_ON_CPU_ATOMIC(atomicMax, unsigned, std::max(old, value))
CUDA_ON_CPU_ATOMIC(atomicMin, int, std::min(old, value))
CUDA_ON_CPU_ATOMIC(atomicMin, unsigned, std::min(old, value))
CUDA_ON_CPU_ATOMIC(atomicOr, unsigned, old | value)
CUDA_ON_CPU_ATOMIC(atomicAnd, unsigned, old & value)
CUDA_ON_CPU_ATOMIC(atomicExch, int, value)
CUDA_ON_CPU_ATOMIC(atomicExch, unsigned, value)
CUDA_ON_CPU_ATOMIC(atomicExch, float, value)
#undef CUDA_ON_CPU_ATOMIC
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Arithmetic. The emulation is compiled without contraction, so these are what they say.
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline double __longlong_as_double(long long bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
inline long long __double_as_longlong(double value) {
  long long bits;
  memcpy(&bits, &value, 8);
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
using std::max;
using std::min;

// Loads and stores with a hint for the caches.
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
void __stcg(T* address, T value) {
  *address = value;
}

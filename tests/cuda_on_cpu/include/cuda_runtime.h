// Stands in for NVIDIA's header of this name, so that g++ compiles the kernels of csrc/cuda as they are and runs them
// on the CPU. See README.md in the folder above.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <bit>
#include <type_traits>

#define __global__ __attribute__((unused))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ use_SHARED_or_dynamic_shared_of_cuda_launch_h

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

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

inline void __syncthreads() { cuda_on_cpu::barrier(); }
inline int __syncthreads_count(int vote) { return cuda_on_cpu::barrier(vote != 0); }
inline int __syncthreads_or(int vote) { return cuda_on_cpu::barrier(vote != 0) > 0; }
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
inline int __any_sync(unsigned mask, int vote) {
  const char mine = vote != 0;
  const char* slots = cuda_on_cpu::exchange(mask, "__any_sync", &mine, 1);
  bool any = false;
  for (unsigned lane = 0; lane < 32; ++lane) any |= mask >> lane & 1 && slots[64 * lane];
  return any;
}

// Threads change places at barriers and exchanges only, so that a plain read and write is atomic.
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
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

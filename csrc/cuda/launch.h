// Launches, shared memory and what a kernel's host function asks of the device. tests/cuda_on_cpu has its own header of
// this name, with which g++ compiles the same kernels for the CPU.
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include <thread>

#include "cuda/stream.h"

namespace fedkernels::cuda {

inline const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

struct Shape {
  dim3 grid, block;
  size_t shared = 0;         // bytes of dynamic shared memory
  bool cooperative = false;  // all blocks run at the same time, so that they may wait for each other
};

inline int attribute_of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

inline int multiprocessors() { return attribute_of_device(cudaDevAttrMultiProcessorCount); }

// Bytes of shared memory that one block may have.
inline size_t shared_limit() { return attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Lets the kernel have `bytes` of dynamic shared memory beside its static ones: 48 KB of both need no permission. What
// is allowed belongs to the kernel and not to the launch, and another thread may be between the two: so the limit is
// always set to the maximum and never lowered.
template <typename... Parameters>
cudaError_t allow_shared(size_t bytes, void (*kernel)(Parameters...)) {
  if (bytes == 0) return cudaSuccess;  // static memory alone is always allowed
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess) return error;
  if (bytes + attributes.sharedSizeBytes <= 48 << 10) return cudaSuccess;
  const size_t most = shared_limit() - attributes.sharedSizeBytes;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(most));
}

// Enqueues kernel(arguments...). Returns nullptr, or a message that says what went wrong.
template <typename... Parameters, typename... Arguments>
const char* launch(const Shape& shape, Stream stream, void (*kernel)(Parameters...), Arguments... arguments) {
  if (const cudaError_t error = allow_shared(shape.shared, kernel); error != cudaSuccess) return message(error);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = shape.cooperative ? 1 : 0;
  return message(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

inline const char* fill_zero(void* data, size_t bytes, Stream stream) {
  return message(cudaMemsetAsync(data, 0, bytes, stream));
}

// How many blocks of this shape a multiprocessor holds at the same time.
template <typename... Parameters>
int blocks_at_a_time(const Shape& shape, void (*kernel)(Parameters...)) {
  if (allow_shared(shape.shared, kernel) != cudaSuccess) return 0;
  int blocks = 0;
  const int threads = static_cast<int>(shape.block.x * shape.block.y * shape.block.z);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shape.shared);
  return blocks;
}

// Why the device of this number cannot run the kernel, or nullptr. A thread of its own asks: the current device is a
// thread's, and to make the caller's device current again would create a context there where it has none yet.
template <typename... Parameters>
const char* why_not_on(int device, void (*kernel)(Parameters...)) {
  cudaError_t error = cudaSuccess;
  std::thread([&] {
    error = cudaSetDevice(device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  }).join();
  return message(error);
}

// The block's dynamic shared memory, aligned to 128 bytes.
template <typename T>
__device__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char fedkernels_dynamic_shared[];
  return reinterpret_cast<T*>(fedkernels_dynamic_shared);
}

template <typename T>
struct Same {
  using type = T;
};

}  // namespace fedkernels::cuda

// A variable of the block: SHARED(sums, float[8][32]); SHARED(total, double);
#define SHARED(name, ...) __shared__ typename ::fedkernels::cuda::Same<__VA_ARGS__>::type name

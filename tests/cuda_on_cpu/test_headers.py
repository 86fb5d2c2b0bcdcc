"""What the emulation replaces: cuda/launch.h and ops/cuda.h, over functions of CUDA and of torch that only pretend."""

import subprocess
from pathlib import Path

import pytest

from tests.cuda_on_cpu.emulation import COMPILER, ROOT, SANITIZED, TORCH, TORCH_FLAGS, require_headers_of_torch

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(SANITIZED, reason="it has no kernel"),
]

# Two GPUs whose blocks may have 100,000 bytes of shared memory, and kernels with `static_bytes` of their own. A device
# gets a context by being set, as since CUDA 12.
RUNTIME = """
#pragma once
#include <stddef.h>
#include <set>
#define __device__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaLaunchAttributeCooperative };
using cudaStream_t = struct CUstream_st*;
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct cudaFuncAttributes { size_t sharedSizeBytes; };
struct cudaLaunchAttribute { int id; struct { int cooperative; } val; };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

constexpr size_t OPT_IN = 100000;
inline size_t static_bytes = 0, allowed = 48 << 10;  // allowed: dynamic bytes
inline std::set<int> contexts;
inline thread_local int current_device = 0;

inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
inline cudaError_t cudaGetDevice(int* device) { *device = current_device; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) {
  contexts.insert(device);
  current_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { *value = OPT_IN; return cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
template <typename T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, T*) {
  contexts.insert(current_device);
  attributes->sharedSizeBytes = static_bytes;
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaFuncSetAttribute(T*, cudaFuncAttribute, int bytes) {
  if (bytes + static_bytes > OPT_IN) return cudaErrorInvalidValue;
  allowed = bytes;
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*)(Parameters...), Arguments...) {
  const size_t most = allowed + static_bytes <= 48 << 10 || allowed > 48 << 10 ? allowed : (48 << 10) - static_bytes;
  return config->dynamicSmemBytes <= most ? cudaSuccess : cudaErrorInvalidValue;
}
"""

OF_LAUNCH = """
#include <stdio.h>
#include "cuda/launch.h"
using namespace fedkernels::cuda;
void kernel(int) {}
bool launches(size_t of_kernel, size_t dynamic) {
  static_bytes = of_kernel;
  allowed = 48 << 10;
  return launch({{1}, {32}, dynamic}, nullptr, kernel, 1) == nullptr;
}
int main() {
  const size_t few = 1000, least = 48 << 10;
  printf("%d%d%d%d ", launches(0, 0), launches(0, least), launches(few, least - few), launches(few, least - few + 1));
  printf("%d%d ", launches(few, OPT_IN - few), launches(few, OPT_IN - few + 1));
  contexts.clear();
  printf("%d ", why_not_on(1, kernel) == nullptr);
  printf("%d:", current_device);
  for (int device : contexts) printf("%d", device);
}
"""

# torch's functions for three GPUs, each with a current stream of its own that is not the default one. A tensor is its
# device's number. They take the place of those in torch's library.
OF_OPS = """
#include <stdio.h>
#include "ops/cuda.h"
using namespace fedkernels;

static int32_t current_device = 0;
void* streams[] = {(void*)100, (void*)101, (void*)102};  // 0: torch does not tell
struct DeviceGuardOpaque { int32_t before; };
struct AtenTensorOpaque { int32_t device; };

extern "C" {
int32_t aoti_torch_create_device_guard(int32_t device, DeviceGuardHandle* guard) {
  *guard = new DeviceGuardOpaque{current_device};
  current_device = device;
  return 0;
}
int32_t aoti_torch_delete_device_guard(DeviceGuardHandle guard) {
  current_device = guard->before;
  delete guard;
  return 0;
}
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor) { delete tensor; return 0; }
int32_t aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* device) { *device = tensor->device; return 0; }
int32_t aoti_torch_get_device_type(AtenTensorHandle, int32_t* type) { *type = 1; return 0; }
int32_t aoti_torch_device_type_cuda() { return 1; }
int32_t aoti_torch_is_contiguous(AtenTensorHandle, bool* contiguous) { *contiguous = true; return 0; }
int32_t aoti_torch_get_data_ptr(AtenTensorHandle, void** data) { *data = nullptr; return 0; }
int32_t aoti_torch_get_dtype(AtenTensorHandle, int32_t* dtype) { *dtype = aoti_torch_dtype_float32(); return 0; }
}

static Tensor on(int32_t device) { return Tensor(new AtenTensorOpaque{device}); }
static int stream_of(const OnDevice& device) { return static_cast<int>(reinterpret_cast<intptr_t>(device.stream())); }
template <typename Body>
static void refused(const Body& body) {
  try {
    body();
    printf("accepted ");
  } catch (const std::exception& error) {
    printf("refused on %d ", current_device);
  }
}

int main() {
  if (!aoti_torch_get_current_cuda_stream) return refused([] { OnDevice device(on(1)); }), 0;
  {
    OnDevice outer(on(1));
    printf("%d:%d ", current_device, stream_of(outer));
    {
      OnDevice inner(on(2));
      printf("%d:%d ", current_device, stream_of(inner));
    }
    printf("%d ", current_device);
    cuda_array_of(on(1), "x", 1);
    refused([] { cuda_array_of(on(2), "x", 1); });
  }
  check_cuda(nullptr);
  refused([] { OnDevice device(on(1)); check_cuda("a launch failed"); });
  streams[2] = nullptr;
  refused([] { OnDevice device(on(2)); });
}
"""


# Of a torch with CUDA.
OF_STREAMS = """
extern void* streams[];
extern "C" int aoti_torch_get_current_cuda_stream(int device, void** stream) {
  *stream = streams[device];
  return !*stream;
}
"""


def compiled(folder: Path, name: str, text: str, *flags: object) -> Path:
    (folder / "cuda_runtime.h").write_text(RUNTIME)
    (folder / f"{name}.cpp").write_text(text)
    call(f"-I{folder}", f"-I{ROOT / 'csrc'}", *flags, "-c", folder / f"{name}.cpp", "-o", folder / f"{name}.o")
    return folder / f"{name}.o"


def call(*arguments: object) -> None:
    done = subprocess.run([COMPILER, "-std=c++20", "-pthread", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(folder: Path, *linked: object) -> str:
    call(*linked, "-o", folder / "main")
    return subprocess.run([folder / "main"], capture_output=True, text=True).stdout.strip()


def test_shared_memory_and_contexts(tmp_path):
    """Launches up to 48 KB and beyond, with the most that a block may have and a byte more; then a device is asked."""
    assert run(tmp_path, compiled(tmp_path, "launch", OF_LAUNCH)) == "1111 10 1 0:1"


def test_device_and_stream_are_those_of_the_tensor(tmp_path):
    """Of two tensors, one inside the other; then the outer device again, and a tensor that lies elsewhere.

    At last the caller's device, after a kernel's error and after a stream that torch does not tell. A torch without
    CUDA has no function for streams.
    """
    require_headers_of_torch()
    of_torch = f"-L{TORCH / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}"
    main, streams = compiled(tmp_path, "ops", OF_OPS, *TORCH_FLAGS), compiled(tmp_path, "streams", OF_STREAMS)
    assert run(tmp_path, main, streams, *of_torch) == "1:101 2:102 1 refused on 1 refused on 0 refused on 0"
    assert run(tmp_path, main, *of_torch) == "refused on 0"

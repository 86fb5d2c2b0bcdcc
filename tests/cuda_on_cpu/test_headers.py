"""What the emulation replaces in csrc/cuda: launch.h over a runtime that only pretends, and the barrier of ptx.h."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cuda_on_cpu.emulation import ROOT, SANITIZED, planted

CUDA = ROOT / "csrc/cuda"
LAUNCH, PTX = CUDA / "launch.h", CUDA / "ptx.h"
COMPILER = shutil.which("g++") or shutil.which("clang++")

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
#define CUDART_VERSION 13000
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
inline cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
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
template <typename T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, T*, int, size_t) {
  *blocks = 1;
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

OF_BARRIER = """
#include <atomic>
#include <stdio.h>
#include <stdlib.h>
#include <thread>
#include <vector>
#define __device__
struct { int x; } const threadIdx = {0};  // a block of one thread
void __syncthreads() {}
void __threadfence() {}
template <typename Counter>
Counter atomicAdd(Counter* counter, Counter value) { return std::atomic_ref(*counter).fetch_add(value); }
thread_local long spins = 0;
template <typename Counter>
Counter load(Counter* counter) {
  if (sizeof(Counter) == 4 && ++spins > 20000) {
    puts("it hangs");
    exit(1);
  }
  std::this_thread::yield();
  return std::atomic_ref(*counter).load();
}
BARRIER
int main() {
  constexpr unsigned BLOCKS = 3;
  COUNTER counter = static_cast<COUNTER>((1ull << 32) / BLOCKS * BLOCKS - 3 * BLOCKS);
  std::atomic<int> round[BLOCKS] = {};
  std::atomic<bool> together = true;
  std::vector<std::thread> blocks;
  for (unsigned block = 0; block < BLOCKS; ++block) {
    blocks.emplace_back([&, block] {
      for (int r = 1; r <= 8; ++r) {
        round[block] = r;
        barrier_of_blocks(&counter, BLOCKS);
        for (const auto& other : round) {
          if (other < r) together = false;  // it went on before another had arrived
        }
      }
    });
  }
  for (std::thread& block : blocks) block.join();
  puts(together ? "together" : "apart");
}
"""


def run(folder: Path, main: str, **files: str) -> str:
    (folder / "cuda").mkdir()
    for name, text in files.items():
        (folder / name.replace("__", "/")).with_suffix(".h").write_text(text)
    (folder / "main.cpp").write_text(main)
    command = [COMPILER, "-std=c++20", "-O1", "-pthread", f"-I{folder}", f"-I{ROOT / 'csrc'}", folder / "main.cpp"]
    done = subprocess.run([*command, "-o", folder / "main"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return subprocess.run([folder / "main"], capture_output=True, text=True).stdout.strip()


# Four launches up to 48 KB and beyond, the most that a block may have and one byte more; then a device that is asked.
EXPECTED = "1111 10 1 0:1"


def test_shared_memory_and_contexts(tmp_path):
    assert run(tmp_path, OF_LAUNCH, cuda_runtime=RUNTIME) == EXPECTED


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        # The static bytes were left out of what 48 KB hold, and of the limit.
        ("if (bytes + attributes.sharedSizeBytes <= 48 << 10)", "if (bytes <= 48 << 10)", "1110 10 1 0:1"),
        ("shared_limit() - attributes.sharedSizeBytes", "shared_limit()", "1110 00 1 0:1"),
        # The caller's device was made current again, and got a context by it.
        (
            "  std::thread([&] {\n    error = cudaSetDevice(device);",
            "  int before = 0;\n  cudaGetDevice(&before);\n  {\n    error = cudaSetDevice(device);",
            "1111 10 1 0:01",
        ),
    ],
)
def test_faults_of_launch_are_found(tmp_path, old, new, found):
    text = planted(LAUNCH, old, new)
    if "before" in new:
        text = text.replace("  }).join();", "  }\n  cudaSetDevice(before);")
    assert run(tmp_path, OF_LAUNCH, cuda_runtime=RUNTIME, cuda__launch=text) == found != EXPECTED


def barrier(counter: str) -> str:
    """The barrier of ptx.h with its one instruction as C++, for a counter of this type. One of 32 bits may hang."""
    (text,) = re.findall(r"^__device__ inline void barrier_of_blocks.*?^}$", PTX.read_text(), re.DOTALL | re.MULTILINE)
    text, count = re.subn(r"asm volatile\(.*?\);", "arrived = load(counter);", text, flags=re.DOTALL)
    assert count == 1
    text = text.replace("unsigned long long", counter).replace("1ull", f"{counter}(1)")
    return OF_BARRIER.replace("BARRIER", text).replace("COUNTER", counter)


def test_blocks_wait_for_each_other_beyond_32_bits(tmp_path):
    assert run(tmp_path, barrier("ulong")) == "together"


def test_a_counter_of_32_bits_is_found(tmp_path):
    assert run(tmp_path, barrier("unsigned")) in ("apart", "it hangs")

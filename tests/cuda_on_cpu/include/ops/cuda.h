// The twin of csrc/ops/cuda.h: that file itself, but tensors on the CPU count as CUDA's, and device, stream and memory
// are stand-ins. Operators are registered for the CPU, in the library CUDA_ON_CPU_LIBRARY beside the package's own.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>

#define is_cuda is_cpu
#define OnDevice OnCudaDevice
#define check_cuda check_cuda_alone
#define memory_on memory_on_cuda
#include_next "ops/cuda.h"
#undef OnDevice
#undef check_cuda
#undef memory_on

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(library, key, m) _STABLE_TORCH_LIBRARY_IMPL(CUDA_ON_CPU_LIBRARY, CPU, m, C10_UID)

namespace cuda_on_cpu {
extern const void* expected_stream;  // runtime.cpp
bool is_reversed();
}

namespace fedkernels {

#if defined(__SANITIZE_ADDRESS__)
constexpr int64_t MARGIN = 0;  // AddressSanitizer has its own, which kernels must not even read
#else
constexpr int64_t MARGIN = 256;  // bytes, a multiple of every alignment
#endif
static std::vector<Tensor> memory;  // with its margins: all that the binding at work was given

class OnDevice {
 public:
  explicit OnDevice(const Tensor&) { cuda_on_cpu::expected_stream = stream(); }
  ~OnDevice() {
    cuda_on_cpu::expected_stream = nullptr;
    memory.clear();
  }
  cuda::Stream stream() const { return reinterpret_cast<cuda::Stream>(16); }
};

// Starts as NaN, or -1, and in the reversed order as large numbers; its margins are -1, and no kernel may write there.
static Tensor memory_on(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  const int64_t margin = MARGIN / torch::stable::new_empty(like, {1}, dtype).element_size();
  Tensor whole = torch::stable::new_empty(like, {count + 2 * margin}, dtype);
  std::memset(whole.data_ptr(), 0xff, whole.numel() * whole.element_size());
  if (cuda_on_cpu::is_reversed()) {
    std::memset(static_cast<char*>(whole.data_ptr()) + MARGIN, 0x4b, count * whole.element_size());
  }
  memory.push_back(whole);
  return torch::stable::view(torch::stable::narrow(whole, 0, margin, count), shape);
}

static void check_cuda(const char* error) {
  check_cuda_alone(error);
  for (const Tensor& whole : memory) {
    const char* const start = static_cast<const char*>(whole.data_ptr());
    const char* const end = start + whole.numel() * whole.element_size();
    const auto untouched = [](char byte) { return byte == static_cast<char>(0xff); };
    STD_TORCH_CHECK(std::all_of(start, start + MARGIN, untouched) && std::all_of(end - MARGIN, end, untouched),
                    "a kernel writes beside the memory that it was given");
  }
}

}  // namespace fedkernels

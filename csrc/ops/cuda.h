// What the CUDA implementations of the operators share: torch's current stream, memory from torch, errors.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "cuda/stream.h"
#include "ops/tensors.h"

// Defined by the CUDA library of torch; a torch for CPUs has none, and never calls what needs it.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace fedkernels {

// Makes a tensor's device the current one, as long as this lives, and holds the stream that torch would use there.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream, "this torch has no CUDA");
    void* stream = nullptr;
    const int32_t error = aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream);
    STD_TORCH_CHECK(error == 0, "torch gives no stream of CUDA");  // its own macro for this has other names by version
    stream_ = static_cast<cuda::Stream>(stream);
  }
  cuda::Stream stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cuda::Stream stream_;
};

// A host function of csrc/cuda returns nullptr, or a message that says what went wrong.
inline void check_cuda(const char* error) { STD_TORCH_CHECK(!error, "CUDA: ", error); }

inline Array cuda_array_of(const Tensor& tensor, const char* name, int32_t device) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous() && tensor.get_device_index() == device, name,
                  " must be contiguous and on the device of the first tensor");
  return {tensor.data_ptr(), dtype_of(tensor, name)};
}

// Uninitialised memory on the device of `like`. It may go when the operator returns: the stream is the one that torch
// counts its use by.
inline Tensor memory_on(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  return torch::stable::new_empty(like, shape, dtype);
}

}  // namespace fedkernels

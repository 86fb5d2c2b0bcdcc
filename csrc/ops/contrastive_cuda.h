// What the CUDA implementations of info_nce and nt_xent share.
#pragma once

#include <string>

#include "cuda/contrastive.h"
#include "ops/cuda.h"

namespace fedkernels {

// Two matrices in one half precision on one device.
inline void check_contrastive(const Tensor& first, const Tensor& second, const char* names) {
  STD_TORCH_CHECK(first.is_cuda() && second.is_cuda() && first.get_device_index() == second.get_device_index() &&
                      first.is_contiguous() && second.is_contiguous(),
                  names, " must be contiguous and on one device");
  STD_TORCH_CHECK(first.scalar_type() == second.scalar_type() &&
                      (first.scalar_type() == ScalarType::BFloat16 || first.scalar_type() == ScalarType::Half),
                  names, " must both be bfloat16 or both float16 on CUDA");
  STD_TORCH_CHECK(first.size(0) < (1 << 30) && second.size(0) < (1 << 30), names, " have too many rows");
}

inline Tensor floats_on(const Tensor& like, const std::vector<int64_t>& shape) {
  return memory_on(like, shape, ScalarType::Float);
}

inline float* floats_of(const Tensor& tensor) {
  return tensor.numel() ? static_cast<float*>(tensor.data_ptr()) : nullptr;
}

inline void run_pass(const cuda::ContrastivePass& pass, const Tensor& like, cuda::Stream stream) {
  const int64_t bytes = cuda_contrastive_memory(pass.row_count, pass.column_count, pass.width, pass.gradient);
  const Tensor memory = floats_on(like, {bytes / 4});
  check_cuda(cuda_contrastive(&pass, memory.data_ptr(), stream));
}

inline Tensor reduced_on_cuda(const Tensor& losses, const std::string& reduction, cuda::Stream stream) {
  STD_TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none",
                  "reduction must be mean, sum or none");
  if (reduction == "none") return losses;
  Tensor result = floats_on(losses, {});
  const double divisor = reduction == "mean" ? static_cast<double>(losses.numel()) : 1;
  check_cuda(cuda_contrastive_sum(floats_of(losses), losses.numel(), divisor, floats_of(result), stream));
  return result;
}

}  // namespace fedkernels

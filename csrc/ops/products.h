// Products of matrices by torch, through its dispatcher: from C++ they take the host less long than from Python.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

namespace fedkernels {

template <typename... Arguments>
torch::stable::Tensor product_by_torch(const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack = {torch::stable::detail::from(arguments)...};
  const int32_t error = torch_call_dispatcher("aten::mm", overload, stack.data(), TORCH_ABI_VERSION);
  STD_TORCH_CHECK(error == 0, "torch cannot multiply these matrices");
  return torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
}

// first @ second in `dtype`: where they have another, torch returns it so where it is able to (`wide`), or they are
// widened before.
inline torch::stable::Tensor product(const torch::stable::Tensor& first, const torch::stable::Tensor& second,
                                     torch::headeronly::ScalarType dtype, bool wide) {
  if (first.scalar_type() == dtype) return product_by_torch("", first, second);
  if (wide) return product_by_torch("dtype", first, second, dtype);
  return product_by_torch("", torch::stable::to(first, dtype), torch::stable::to(second, dtype));
}

}  // namespace fedkernels

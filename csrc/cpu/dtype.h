// The dtypes of the operators' inputs.
#pragma once

namespace fedkernels {

enum class DType { f64, f32, bf16, f16 };

struct Array {  // contiguous
  void* data;
  DType dtype;
};

}  // namespace fedkernels

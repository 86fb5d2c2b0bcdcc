// What the operators info_nce and nt_xent share.
#pragma once

#include <string>

#include "ops/contrastive_checks.h"
#include "ops/threads.h"

namespace fedkernels {

// Of the shape of `input`, or empty where no gradient is wanted.
inline Tensor gradient_of(const Tensor& input, bool wide, bool wanted) {
  if (!wanted) return torch::stable::empty({0}, result_dtype(wide));
  return torch::stable::empty({input.size(0), input.size(1)}, result_dtype(wide));
}

inline const double* weights_of(const Tensor& weights, int64_t rows) {
  STD_TORCH_CHECK(weights.is_cpu() && weights.is_contiguous() && weights.scalar_type() == ScalarType::Double &&
                      weights.numel() == rows,
                  "weights must be float64 on the CPU, one for each loss");
  return static_cast<const double*>(weights.data_ptr());
}

template <class T>
Tensor reduced_of(const Tensor& losses, double divisor) {
  const T* values = static_cast<const T*>(losses.data_ptr());
  double total = 0;
  for (int64_t i = 0; i < losses.numel(); ++i) total += static_cast<double>(values[i]);
  Tensor result = torch::stable::empty(std::vector<int64_t>{}, losses.scalar_type());
  *static_cast<T*>(result.data_ptr()) = static_cast<T>(total / divisor);
  return result;
}

inline Tensor reduced(const Tensor& losses, const std::string& reduction) {
  check_reduction(reduction);
  if (reduction == "none") return losses;
  const double divisor = divisor_of(reduction, losses);
  return losses.scalar_type() == ScalarType::Double ? reduced_of<double>(losses, divisor)
                                                    : reduced_of<float>(losses, divisor);
}

}  // namespace fedkernels

// The checks of a contrastive loss's arguments, for CPU and CUDA alike.
#pragma once

#include <string>

#include "ops/tensors.h"

namespace fedkernels {

inline void check_info_nce(const Tensor& query, const Tensor& key) {
  STD_TORCH_CHECK(query.dim() == 2 && key.dim() == 2 && query.size(1) == key.size(1) && query.size(1) > 0 &&
                      query.size(0) > 0 && key.size(0) >= query.size(0),
                  "query must have shape [B, d] and key [N, d], N >= B > 0");
}

inline void check_nt_xent(const Tensor& view1, const Tensor& view2) {
  STD_TORCH_CHECK(view1.dim() == 2 && view2.dim() == 2 && view1.size(0) == view2.size(0) &&
                      view1.size(1) == view2.size(1) && view1.size(0) > 0 && view1.size(1) > 0,
                  "view1 and view2 must have the same shape [B, d], B > 0 and d > 0");
}

inline void check_reduction(const std::string& reduction) {
  STD_TORCH_CHECK(reduction == "mean" || reduction == "sum" || reduction == "none",
                  "reduction must be mean, sum or none");
}

// What the sum of the losses is divided by.
inline double divisor_of(const std::string& reduction, const Tensor& losses) {
  return reduction == "mean" ? static_cast<double>(losses.numel()) : 1;
}

}  // namespace fedkernels

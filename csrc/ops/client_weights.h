// The shapes of client_weights, for CPU and CUDA alike.
#pragma once

#include "ops/tensors.h"

namespace fedkernels {

struct GramShapes {
  int64_t clients, problems;
  std::vector<int64_t> weights;  // [..., clients], for gram [..., clients, clients]

  explicit GramShapes(const Tensor& gram) {
    const int64_t ndim = gram.dim();
    STD_TORCH_CHECK(ndim >= 2 && gram.size(ndim - 1) == gram.size(ndim - 2) && gram.size(ndim - 1) > 0,
                    "gram must have shape [..., K, K]");
    clients = gram.size(ndim - 1);
    problems = gram.numel() / clients / clients;
    weights.assign(gram.sizes().begin(), gram.sizes().end() - 1);
  }
};

}  // namespace fedkernels

// The shapes and results of unbalanced_ot, for CPU and CUDA alike.
#pragma once

#include <tuple>

#include "ops/tensors.h"

namespace fedkernels {

// plan, u, v, value, mass, iterations, gap: in the shapes of the fake implementation in fedkernels/unbalanced_ot.py.
using Solutions = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct TransportShapes {
  int64_t rows, columns, problems;
  std::vector<int64_t> batch, of_plan, of_rows, of_columns;  // [...], [..., M, N], [..., M] and [..., N]

  TransportShapes(const Tensor& cost, const Tensor& a, const Tensor& b) {
    const int64_t ndim = cost.dim();
    STD_TORCH_CHECK(ndim >= 2 && a.dim() == ndim - 1 && b.dim() == ndim - 1, "cost must have shape [..., M, N]");
    rows = cost.size(ndim - 2);
    columns = cost.size(ndim - 1);
    STD_TORCH_CHECK(rows > 0 && columns > 0, "cost must not be empty in M or N");
    problems = cost.numel() / rows / columns;
    STD_TORCH_CHECK(a.numel() == problems * rows && b.numel() == problems * columns,
                    "a and b must have shapes [..., M] and [..., N]");
    of_plan.assign(cost.sizes().begin(), cost.sizes().end());
    batch.assign(of_plan.begin(), of_plan.end() - 2);
    of_rows = of_columns = batch;
    of_rows.push_back(rows);
    of_columns.push_back(columns);
  }
};

}  // namespace fedkernels

#include "cpu/add_products.h"

#include <tuple>

#include "ops/tensors.h"
#include "ops/threads.h"

namespace fedkernels {

static double* sums_of(const Tensor& tensor, int64_t rows, int64_t columns, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == ScalarType::Double &&
                      tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns,
                  name, " must be contiguous float64 of the products' sizes on the CPU");
  return static_cast<double*>(data_or_null(tensor));
}

// -> The squared norms of the rows [N + M, L], and the sums of rows weighted by these and by 1 [N + M + 1, D].
static std::tuple<Tensor, Tensor> add_products_cpu(Tensor block, std::vector<int64_t> widths, int64_t first,
                                                   Tensor cross, std::vector<Tensor> own) {
  const Array rows = array_of(block, "block");
  const int64_t count = widths.size();
  STD_TORCH_CHECK(rows.dtype == DType::f32 || rows.dtype == DType::f64, "block must be float32 or float64");
  STD_TORCH_CHECK(block.dim() == 2 && first >= 0 && first <= count && static_cast<int64_t>(own.size()) == count,
                  "block must be [L, D], and own must hold a product for each width");
  int64_t columns[] = {0, 0};
  std::vector<double*> sums;
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(widths[i] > 0, "widths must be positive");
    columns[i >= first] += widths[i];
    sums.push_back(sums_of(own[i], widths[i], widths[i], "own"));
  }
  STD_TORCH_CHECK(columns[0] + columns[1] == block.size(1), "widths must be those of the block's columns");
  const Tensor norms = torch::stable::empty({count, block.size(0)}, ScalarType::Double);
  double* const of_pairs = sums_of(cross, columns[0], columns[1], "cross");
  const Tensor weighted = torch::stable::empty({count + 1, block.size(1)}, ScalarType::Double);
  const ProductsProblem problem{rows.data,
                                rows.dtype == DType::f64,
                                block.size(0),
                                block.size(1),
                                widths.data(),
                                count,
                                first,
                                of_pairs,
                                sums.data(),
                                static_cast<double*>(data_or_null(norms)),
                                static_cast<double*>(data_or_null(weighted))};
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(add_products)(problem, threads, memory);
  });
  return {norms, weighted};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) { m.impl("add_products", TORCH_BOX(&add_products_cpu)); }

}  // namespace fedkernels

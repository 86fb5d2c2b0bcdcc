// The contrastive operators of CUDA on the CPU, without their kernels: what is left is the host's part, with its call
// through torch's dispatcher and its memory. benchmarks/launches.py compiles it, against libtorch's stable ABI.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "ops/products.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Doubles = std::vector<double>;
using Integers = std::vector<int64_t>;
using Maybe = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

static Tensor memory_on(const Tensor& like, const Integers& shape, ScalarType dtype) {
  return torch::stable::new_empty(like, shape, dtype);
}

static void sums(Tensor, Integers, double, Tensors, Tensor, Tensor, Tensor, Tensor) {}
static void weights(Tensor, Integers, double, Tensors, Tensors, Doubles, double, Tensor, Tensor) {}
static void sigmoid(Tensor, Integers, double, Tensors, Tensor, double, Tensor, Tensor, Tensor, Tensor, Tensor) {}
static std::tuple<Tensor, Tensor> finish(Tensor weights, int64_t, bool, bool, double, double, Maybe, Maybe, Tensor query,
                                         Tensor key, bool wide, bool of_query, bool of_key, Tensor, Tensor, Maybe, Maybe) {
  const ScalarType dtype = weights.scalar_type();
  const Tensor nothing = memory_on(weights, {0}, dtype), across = torch::stable::transpose(weights, 0, 1);
  return {of_query ? fedkernels::product(weights, key, dtype, wide) : nothing,
          of_key ? fedkernels::product(across, query, dtype, wide) : nothing};
}

static std::tuple<Tensor, Tensor, Tensor> one_tile(Tensor query, Tensor key, int64_t, bool, bool, double, double, double,
                                                   double, double, Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, bool wide,
                                                   bool, bool) {
  const Tensor across = torch::stable::transpose(key, 0, 1);
  const Tensor products = fedkernels::product(query, across, query.scalar_type(), wide);
  return {memory_on(products, {}, products.scalar_type()), memory_on(products, {3}, ScalarType::Double), products};
}
static std::tuple<Tensor, Tensor> in_one(Tensor query, Tensor, double, bool) {
  return {memory_on(query, {query.size(0)}, ScalarType::Float),
          memory_on(query, {query.size(0), query.size(1)}, ScalarType::Float)};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) {
  m.impl("contrastive_sums", TORCH_BOX(&sums));
  m.impl("contrastive_weights", TORCH_BOX(&weights));
  m.impl("contrastive_sigmoid", TORCH_BOX(&sigmoid));
  m.impl("contrastive_finish", TORCH_BOX(&finish));
  m.impl("contrastive_one_tile", TORCH_BOX(&one_tile));
  m.impl("contrastive_in_one", TORCH_BOX(&in_one));
}

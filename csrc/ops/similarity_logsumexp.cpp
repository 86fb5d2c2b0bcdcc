#include "cpu/similarity_logsumexp.h"

#include <tuple>

#include "ops/contrastive.h"

namespace fedkernels {

// The data of an optional tensor, which is empty where it is missing.
template <class T>
static const T* optional(const Tensor& tensor, ScalarType dtype, int64_t count, const char* name) {
  if (tensor.numel() == 0) return nullptr;
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == dtype &&
                      tensor.numel() == count,
                  name, " must be contiguous on the CPU, with the right dtype and number of entries");
  return static_cast<const T*>(tensor.data_ptr());
}

static SimilarityProblem problem_of(const Tensor& query, const Tensor& key, const Tensor& positives,
                                    const Tensor& query_labels, const Tensor& key_labels, const Tensor& excluded) {
  STD_TORCH_CHECK(query.dim() == 2 && key.dim() == 2 && query.size(1) == key.size(1) && query.numel() > 0 &&
                      key.numel() > 0,
                  "query must have shape [B, d] and key [N, d], none of them 0");
  const int64_t queries = query.size(0), keys = key.size(0);
  SimilarityProblem problem{};
  problem.query = array_of(query, "query");
  problem.key = array_of(key, "key");
  problem.queries = queries;
  problem.keys = keys;
  problem.width = query.size(1);
  problem.wide = problem.query.dtype == DType::f64 || problem.key.dtype == DType::f64;
  problem.positives = optional<int64_t>(positives, ScalarType::Long, queries, "positives");
  problem.query_labels = optional<int64_t>(query_labels, ScalarType::Long, queries, "query_labels");
  problem.key_labels = optional<int64_t>(key_labels, ScalarType::Long, keys, "key_labels");
  problem.excluded = optional<bool>(excluded, ScalarType::Bool, queries * keys, "excluded");
  STD_TORCH_CHECK(!problem.query_labels == !problem.key_labels, "labels must be given for both sides or for none");
  for (int64_t i = 0; problem.positives && i < queries; ++i) {
    STD_TORCH_CHECK(problem.positives[i] >= 0 && problem.positives[i] < keys,
                    "positives must be numbers of keys, from 0 to N - 1");
  }
  return problem;
}

static Tensor doubles(bool wanted, int64_t count) {
  return torch::stable::empty({wanted ? count : 0}, ScalarType::Double);
}

static std::tuple<Tensor, Tensor, Tensor> similarity_logsumexp_cpu(Tensor query, Tensor key, Tensor positives,
                                                                   Tensor query_labels, Tensor key_labels,
                                                                   Tensor excluded, bool columns) {
  SimilarityProblem problem = problem_of(query, key, positives, query_labels, key_labels, excluded);
  Tensor of_rows = doubles(true, problem.queries), of_columns = doubles(columns, problem.keys);
  Tensor of_positives = doubles(problem.positives, problem.queries);
  problem.rows = static_cast<double*>(of_rows.data_ptr());
  problem.columns = static_cast<double*>(data_or_null(of_columns));
  problem.positive_logits = static_cast<double*>(data_or_null(of_positives));
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(similarity_logsumexp)(problem, nullptr, threads, memory);
  });
  return {of_rows, of_columns, of_positives};
}

static std::tuple<Tensor, Tensor> similarity_logsumexp_gradients_cpu(
    Tensor query, Tensor key, Tensor positives, Tensor query_labels, Tensor key_labels, Tensor excluded, Tensor rows,
    Tensor columns, Tensor row_weights, Tensor column_weights, Tensor positive_weights, bool query_gradient,
    bool key_gradient) {
  SimilarityProblem problem = problem_of(query, key, positives, query_labels, key_labels, excluded);
  const auto of = [](const Tensor& tensor, int64_t count, const char* name) {
    return optional<double>(tensor, ScalarType::Double, count, name);
  };
  problem.rows = const_cast<double*>(of(rows, problem.queries, "rows"));
  problem.columns = const_cast<double*>(of(columns, problem.keys, "columns"));
  SimilarityGradients gradients{};
  gradients.row_weights = of(row_weights, problem.queries, "row_weights");
  gradients.column_weights = of(column_weights, problem.keys, "column_weights");
  gradients.positive_weights = of(positive_weights, problem.queries, "positive_weights");
  STD_TORCH_CHECK((problem.rows || !gradients.row_weights) && (problem.columns || !gradients.column_weights) &&
                      (problem.positives || !gradients.positive_weights),
                  "weights must belong to results of similarity_logsumexp");
  Tensor to_query = gradient_of(query, problem.wide, query_gradient);
  Tensor to_key = gradient_of(key, problem.wide, key_gradient);
  gradients.query_gradient = data_or_null(to_query);
  gradients.key_gradient = data_or_null(to_key);
  run_kernel([&](const Threads& threads, void* memory) {
    return FEDKERNELS_BEST(similarity_logsumexp)(problem, &gradients, threads, memory);
  });
  return {to_query, to_key};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CPU, m) {
  m.impl("similarity_logsumexp", TORCH_BOX(&similarity_logsumexp_cpu));
  m.impl("similarity_logsumexp_gradients", TORCH_BOX(&similarity_logsumexp_gradients_cpu));
}

}  // namespace fedkernels

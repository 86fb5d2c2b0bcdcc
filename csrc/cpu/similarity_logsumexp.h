// The log-sum-exps of the inner products of queries and keys, over the keys and over the queries, and their gradients.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct SimilarityProblem {
  Array query, key;              // [queries, width] and [keys, width]
  int64_t queries, keys, width;  // all positive
  bool wide;                     // arithmetic and gradients in double, else in float

  const int64_t* positives;                 // [queries], the key of each; null: none
  const int64_t *query_labels, *key_labels;  // [queries], [keys]: pairs of equal labels are left out; null: none are
  const bool* excluded;                      // [queries, keys]: pairs that are left out; null: none are

  double *rows, *columns;     // [queries], [keys]: the results; inputs of the gradients; null: not wanted
  double* positive_logits;    // [queries]: a result; null without positives
};

// The gradients are those of sum(row_weights * rows) + sum(column_weights * columns) + sum(positive_weights *
// positive_logits).
struct SimilarityGradients {
  const double *row_weights, *column_weights, *positive_weights;  // null: 0
  void *query_gradient, *key_gradient;                            // null: not wanted
};

}  // namespace fedkernels

// The log-sum-exps, or with `gradients` their gradients. -> The bytes of memory, aligned to 64, that a problem wants.
// Where `memory` is null that is all that is done.
FEDKERNELS_DECLARE(similarity_logsumexp, int64_t, const SimilarityProblem& problem,
                   const SimilarityGradients* gradients, const Threads& threads, void* memory)

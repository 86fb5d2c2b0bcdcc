// Unbalanced optimal transport with half-squared marginal penalties: one problem, solved to a relative duality gap.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"

namespace fedkernels {

enum class TransportMethod { accelerated, interior_point, steepest };

struct TransportProblem {
  Array cost;  // [rows, columns], from entry cost_start on
  Array a;     // [rows], from entry a_start on
  Array b;     // [columns], from entry b_start on
  int64_t cost_start, a_start, b_start;
  int64_t rows, columns;
  double tau_a, tau_b, tol;
  int64_t max_iterations;
  TransportMethod method;
};

struct TransportSolution {
  Array plan;  // [rows, columns], written from entry plan_start on
  int64_t plan_start;
  double* u;  // [rows]: tau_a (a - plan 1)
  double* v;  // [columns]: tau_b (b - plan' 1)
  double value, gap, mass;
  int64_t iterations;
};

constexpr int64_t TRANSPORT_GROUP = 8;  // a row's candidates are padded to a multiple of it

// Rows or columns with their padding, at least one.
static inline int64_t transport_pitch(int64_t count) { return (count / TRANSPORT_GROUP + 1) * TRANSPORT_GROUP; }

// Doubles of workspace for the steps on candidates: 13 vectors of rows and 11 of columns, and for each candidate its
// cost, four plans and its column in 32 bits. There is room for all entries as candidates; few are ever touched.
static inline int64_t candidates_workspace(int64_t rows, int64_t columns) {
  const int64_t candidates = rows * transport_pitch(columns);
  return 13 * transport_pitch(rows) + 11 * transport_pitch(columns) + 5 * candidates + candidates / 2;
}

constexpr int64_t INTERIOR_BLOCK = 32;  // columns of the interior point's factor that are finished together

// Rows or columns with their padding, at least one.
static inline int64_t interior_pitch(int64_t count) { return (count / INTERIOR_BLOCK + 1) * INTERIOR_BLOCK; }

// The same for the interior point: 8 vectors of either side, 5 matrices of all entries, one of them with rows up to a
// multiple of 4, and the factor. It touches them only in a problem that the steps on candidates do not solve in time.
static inline int64_t interior_workspace(int64_t rows, int64_t columns) {
  const int64_t shorter = rows < columns ? rows : columns, longer = rows < columns ? columns : rows;
  const int64_t pitch = interior_pitch(shorter), rows_of_all = 4 * shorter + (shorter + 3) / 4 * 4;
  return 8 * pitch + (8 + rows_of_all) * transport_pitch(longer) + pitch * pitch;
}

static inline int64_t transport_workspace(int64_t rows, int64_t columns) {
  return candidates_workspace(rows, columns) + interior_workspace(rows, columns);
}

}  // namespace fedkernels

// `workspace` is aligned to 64 bytes; columns < 2^31 - 8.
FEDKERNELS_DECLARE(unbalanced_ot, void, const TransportProblem& problem, double* workspace, TransportSolution* solution)

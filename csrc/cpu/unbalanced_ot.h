// Unbalanced optimal transport with half-squared marginal penalties: one problem, solved to a relative duality gap.
#pragma once

#include "cpu/dtype.h"
#include "cpu/isa.h"

namespace fedkernels {

struct TransportProblem {
  Array cost;  // [rows, columns], from entry cost_start on
  Array a;     // [rows], from entry a_start on
  Array b;     // [columns], from entry b_start on
  int64_t cost_start, a_start, b_start;
  int64_t rows, columns;
  double tau_a, tau_b, tol;
  int64_t max_iterations;
  bool accelerated;
};

struct TransportSolution {
  Array plan;  // [rows, columns], written from entry plan_start on
  int64_t plan_start;
  double* u;  // [rows]: tau_a (a - plan 1)
  double* v;  // [columns]: tau_b (b - plan' 1)
  double value, gap, mass;
  int64_t iterations;
};

constexpr int64_t TRANSPORT_BLOCK = 16;  // columns that are skipped together where the plan is 0 and stays 0

inline int64_t transport_pitch(int64_t columns) {
  return (columns + TRANSPORT_BLOCK - 1) / TRANSPORT_BLOCK * TRANSPORT_BLOCK;
}

// Bands of rows that threads may work on at the same time. Their number depends on the size alone, and so does the
// result; below some hundred rows and columns a step is too short to be shared.
constexpr int64_t TRANSPORT_BANDS = 8;

inline int64_t transport_bands(int64_t rows, int64_t columns) {
  return rows * columns < 131072 || rows < TRANSPORT_BANDS ? 1 : TRANSPORT_BANDS;
}

// Calls body(index, context) for index = 0 .. count - 1, in any order and on any threads.
using ParallelFor = void (*)(int64_t count, void (*body)(int64_t index, void* context), void* context);

// Doubles of workspace: the cost, four plans with their marginals and flags, a bound for each block, and some vectors.
inline int64_t transport_workspace(int64_t rows, int64_t columns) {
  const int64_t pitch = transport_pitch(columns), padded_rows = transport_pitch(rows);
  const int64_t blocks = rows * pitch / TRANSPORT_BLOCK;
  const int64_t plan = rows * pitch + padded_rows + pitch + transport_pitch(blocks / 8 + 1);
  return rows * pitch + 4 * plan + transport_pitch(blocks) + 5 * padded_rows + (6 + TRANSPORT_BANDS) * pitch;
}

}  // namespace fedkernels

// `workspace` is aligned to 64 bytes.
FEDKERNELS_DECLARE(unbalanced_ot, void, const TransportProblem& problem, ParallelFor parallel_for, double* workspace,
                   TransportSolution* solution)

// The sums over a block of rows of which CKA of all rows is made: products of representations with one another, squared
// norms of rows, and sums of rows weighted by these.
#pragma once

#include "cpu/isa.h"
#include "cpu/tasks.h"

namespace fedkernels {

struct ProductsProblem {
  const void* block;  // [rows, columns]: the representations side by side
  bool wide;          // it is double, else float
  int64_t rows, columns;
  const int64_t* widths;
  int64_t count, first;  // the first so many meet the others
  double* cross;         // [columns of the first, columns of the others], added to
  double* const* own;    // of each a product with itself, [width, width], of which half is wanted, added to
  double* norms;         // [count, rows]
  double* weighted;      // [count + 1, columns]: by the norms, and by 1
};

}  // namespace fedkernels

// -> The bytes of memory, aligned to 64, that a problem wants. Where `memory` is null that is all that is done.
FEDKERNELS_DECLARE(add_products, int64_t, const ProductsProblem& problem, const Threads& threads, void* memory)

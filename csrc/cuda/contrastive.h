// The contrastive losses between torch's products (contrastive_tiles.cu), and the one kernel that forms its products
// itself (contrastive_tensor_cores.cu). fedkernels/internal/contrastive_cuda.py tells which serves and calls them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

// A tile of the products q_i . k_j of all queries and keys. A logit is a product times `scale`, and times what lies at
// `factor` on the device if that is not null.
struct ContrastiveTile {
  void* products;  // [rows, columns], float64 if `wide`, else float32
  bool wide;
  int64_t rows, columns, first_row, first_column, all_columns;
  double scale;
  const double* factor;
  // Below, i and j count all queries and keys. The positive of i is positives[i], or where this is null
  // (i + shift) % all_columns, or none if shift < 0. Pairs that are left out, unless they are positives: those of equal
  // labels, those that `excluded` marks, and i == j with `leave_out_self`. Null pointers leave out nothing.
  int64_t shift;
  const int64_t *positives, *row_labels, *column_labels;
  const bool* excluded;  // [all rows, all_columns]
  bool leave_out_self;
};

// What the weights of a tile's pairs are made of, all indexed by i or j; null: not used.
//   weight_ij = factor (row_weights_i exp(logit_ij - rows_i) + column_weights_j exp(logit_ij - columns_j)
//                       + positive_weights_i if j is the positive of i)
struct ContrastiveWeights {
  const double *rows, *columns, *row_weights, *column_weights, *positive_weights;
  double factor;
  Array weights;  // [rows, columns]: the tile's own memory, or 16-bit memory beside it
  float* rest;    // what the rounding to 16 bits takes away from the positives' weights, by i
};

}  // namespace fedkernels::cuda

// Each joins the tile to what the tiles before left: rows_i = log(exp(rows_i) + sum_j exp(logit_ij)), so columns_j by
// the sum over i. A positive in the tile writes its logit. `columns` and `of_positives` may be null.
extern "C" const char* cuda_contrastive_sums(const fedkernels::cuda::ContrastiveTile* tile, double* rows,
                                             double* columns, double* of_positives, fedkernels::cuda::Stream stream);
extern "C" const char* cuda_contrastive_weights(const fedkernels::cuda::ContrastiveTile* tile,
                                                const fedkernels::cuda::ContrastiveWeights* given,
                                                fedkernels::cuda::Stream stream);
// rows_i += sum_j log(1 + exp(-z logit_ij)) with z = 1 for the positive and -1 for the others; the derivatives take the
// products' place if they are wanted.
extern "C" const char* cuda_contrastive_sigmoid(const fedkernels::cuda::ContrastiveTile* tile, double* rows,
                                                bool derivatives, fedkernels::cuda::Stream stream);

namespace fedkernels::cuda {

// InfoNCE of 16-bit rows, row i's positive being column i. They begin at multiples of 16 bytes.
struct ContrastivePass {
  Array rows, columns;  // [row_count, width] and [column_count, width], both bfloat16 or both float16
  int64_t row_count, column_count, width;  // width: 64, 128 or 256
  double temperature;
  float* losses;    // [row_count]
  float* gradient;  // [row_count, width], of the sum of the losses; or null
};

}  // namespace fedkernels::cuda

// Bytes of device memory, aligned to 16, that the pass works in.
extern "C" int64_t cuda_contrastive_memory(const fedkernels::cuda::ContrastivePass* pass);
extern "C" const char* cuda_contrastive(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                        fedkernels::cuda::Stream stream);

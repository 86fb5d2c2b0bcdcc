// The contrastive losses between torch's products (contrastive_tiles.cu), and the one kernel that forms its products
// itself (contrastive_tensor_cores.cu). fedkernels/internal/contrastive_cuda.py tells which serves and calls them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

// A tile of the products q_i . k_j of all queries and keys. A logit is a product times `scale`, and times (or by) what
// lies at `factor` on the device if that is not null.
struct ContrastiveTile {
  void* products;  // [rows, columns], float64 if `wide`, else float32
  bool wide;
  int64_t rows, columns, first_row, first_column, all_columns;
  double scale;
  Array factor;
  bool divides;  // by `factor`, which is a temperature
  // Below, i and j count all queries and keys. The positive of i is positives[i], or where this is null
  // (i + shift) % all_columns, or none if shift < 0. Pairs that are left out, unless they are positives: those of equal
  // labels, those that `excluded` marks, and i == j with `leave_out_self`. Null pointers leave out nothing.
  int64_t shift;
  const int64_t *positives, *row_labels, *column_labels;
  const bool* excluded;  // [all rows, all_columns]
  bool leave_out_self;
  // Of a tile of all pairs: all rows of a row's class are its positives, and `positives` and `shift` name none.
  const int64_t* classes;
};

// What the weights of a tile's pairs are made of, all indexed by i or j. Where weights are null they are `constants`.
//   weight_ij = factor (row_weights_i exp(logit_ij - rows_i) + column_weights_j exp(logit_ij - columns_j)
//                       + positive_weights_i if j is the positive of i)
struct ContrastiveWeights {
  const double *rows, *columns, *row_weights, *column_weights, *positive_weights;
  double constants[3];  // of rows, columns and positives; 0: not used
  double factor;
  Array weights;     // [rows, columns]: the tile's own memory, or 16-bit memory beside it
  float* rest;       // what the rounding to 16 bits takes away from the positives' weights, by i; or null
  double* of_scale;  // of each block the sum of weight_ij / factor times the product; or null
};

// What a sigmoid loss takes beside a tile: its derivatives are the weights, each times `factor`.
struct ContrastiveSigmoid {
  Array bias;  // added to the logits, or null
  double factor;
  Array weights;                  // as above; null: not wanted
  float* rest;                    // as above
  double *of_scale, *of_bias;     // by i, the sums of derivatives times products, and of derivatives; or null
};

// How the losses of all rows become one, from what was summed by rows (and columns):
//   sum_i (of_rows rows_i + of_columns columns_i - of_positives_i) / divisor, over the rows that count
struct ContrastiveReduction {
  const double *rows, *columns, *of_positives, *counted;  // null: 0, and for `counted` that all rows count
  int64_t count;
  double of_rows, of_columns;
  double divisor;  // 0: how many rows count, at least 1
  // Sums over these, which may be null, are the loss's derivatives in the logits' scale and bias, before the division.
  const double *of_scale, *of_bias;
  int64_t parts;  // entries of each
  double share;   // of the sum over `of_scale`
  Array loss;
  double* numbers;  // [3]: the derivatives in scale (or temperature) and bias, and 1 / divisor
};

// The last step of the gradients, of rows on two sides: what was summed in float32 or float64 gets the positives' share
// that was lost, is scaled, multiplied with `grad`, and written.
struct ContrastiveGradients {
  Array rows[2], sums[2], to[2];  // queries and keys; what is null is not wanted
  int64_t counts[2], width;
  double factor;        // of the weights
  const float* rest;    // or null
  const double* counted;
  Array grad;
  const double* numbers;  // as above
  Array to_scale, to_bias;
};

}  // namespace fedkernels::cuda

// Each joins the tile to what the tiles before left: rows_i = log(exp(rows_i) + sum_j exp(logit_ij)), so columns_j by
// the sum over i; the first tile of a row or column finds nothing. A positive in the tile writes its logit, the first
// tile NaN where there is none. With classes it is the mean of the positives' logits, or 0, and `counted` tells whether
// there are such. `columns`, `of_positives` and `counted` may be null.
extern "C" const char* cuda_contrastive_sums(const fedkernels::cuda::ContrastiveTile* tile, double* rows,
                                             double* columns, double* of_positives, double* counted,
                                             fedkernels::cuda::Stream stream);
// How many entries `of_scale` has.
extern "C" int64_t cuda_contrastive_parts(const fedkernels::cuda::ContrastiveTile* tile);
extern "C" const char* cuda_contrastive_weights(const fedkernels::cuda::ContrastiveTile* tile,
                                                const fedkernels::cuda::ContrastiveWeights* given,
                                                fedkernels::cuda::Stream stream);
// rows_i += sum_j log(1 + exp(-z logit_ij)) with z = 1 for the positive and -1 for the others; the first tile of a row
// sets it. So `of_scale` and `of_bias`.
extern "C" const char* cuda_contrastive_sigmoid(const fedkernels::cuda::ContrastiveTile* tile,
                                                const fedkernels::cuda::ContrastiveSigmoid* given, double* rows,
                                                fedkernels::cuda::Stream stream);
// `tile` tells the scale and the positives alone.
extern "C" const char* cuda_contrastive_reduce(const fedkernels::cuda::ContrastiveTile* tile,
                                               const fedkernels::cuda::ContrastiveReduction* given,
                                               fedkernels::cuda::Stream stream);
extern "C" const char* cuda_contrastive_finish(const fedkernels::cuda::ContrastiveTile* tile,
                                               const fedkernels::cuda::ContrastiveGradients* given,
                                               fedkernels::cuda::Stream stream);

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

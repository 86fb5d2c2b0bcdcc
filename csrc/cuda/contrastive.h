// The passes that info_nce and nt_xent are made of: on the tensor cores (contrastive_tensor_cores.h) for rows in half
// precision, and in float32 that may be multiplied in tf32; contrastive_wide.cu for float32 and float64 as they are.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cpu/dtype.h"
#include "cuda/stream.h"

namespace fedkernels::cuda {

// What one row of logits s_rc = rows_r . columns_c has to do with the rest of the problem. What the pointers that have
// no type show is float64 where the rows are, else float32.
struct ContrastivePass {
  Array rows, columns;  // [row_count, width] and [column_count, width], both in one dtype
  int64_t row_count, column_count, width;
  double temperature;
  // The positive of row r is column r + shift; a row for which that is not below `positives` has none.
  int64_t shift, positives;
  // SimCLR's mode: rows equal columns, the diagonal is masked, and the index of a positive wraps around.
  bool leave_out_self;

  // What the loss of a row or a column counts is u v.
  // First pass. Sums over each row: largest logit, share = v_r / sum_c exp((s_rc - largest_r) / t) and the loss
  // log(sum) + (largest - s_positive) / t; and, where asked for,
  // gradient_r = u v_r (sum_c p_rc columns_c - positive_r) / t.
  // Second pass, with given sums: gradient_r = u (sum_c w_rc columns_c - n_r positive_r) / t, where w_rc is v_r p_rc by
  // the sums of the row and / or v_c p_rc by those of the column, and n_r is v_r and / or the v of the positive.
  bool given;
  void *row_largest, *row_share;               // [row_count]; written by the first pass; null in the second: not used
  const void *column_largest, *column_share;   // [column_count]; second pass: null: not used
  const void *row_weight, *column_weight;      // v, [row_count] and [column_count]; null: each is 1
  const void* weight_unit;                     // u; null: 1
  void* losses;                                // [row_count]; first pass
  Array gradient;                              // [row_count, width], of any dtype, or without data
};

// Entries of a gradient that are summed in memory of their own at a time: 32 MB of float32.
constexpr int64_t CONTRASTIVE_SUMS_AT_A_TIME = 1 << 23;

}  // namespace fedkernels::cuda

// For rows in bfloat16, in float16, and in float32 that are rounded to tf32; sums and the gradient are float32. The
// second pass has the sums of the columns, and may have those of the rows.
//   fits: does the current device have the shared memory for rows of this width?
//   memory: bytes of device memory, aligned to 16, that the pass works in
extern "C" bool cuda_contrastive_bfloat16_fits(int64_t width);
extern "C" bool cuda_contrastive_float16_fits(int64_t width);
extern "C" bool cuda_contrastive_tf32_fits(int64_t width);

extern "C" int64_t cuda_contrastive_bfloat16_memory(const fedkernels::cuda::ContrastivePass* pass);
extern "C" int64_t cuda_contrastive_float16_memory(const fedkernels::cuda::ContrastivePass* pass);
extern "C" int64_t cuda_contrastive_tf32_memory(const fedkernels::cuda::ContrastivePass* pass);

extern "C" const char* cuda_contrastive_bfloat16(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                                 fedkernels::cuda::Stream stream);
extern "C" const char* cuda_contrastive_float16(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                                fedkernels::cuda::Stream stream);
extern "C" const char* cuda_contrastive_tf32(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                             fedkernels::cuda::Stream stream);

// The same for float32 and float64, of any width.
extern "C" int64_t cuda_contrastive_wide_memory(const fedkernels::cuda::ContrastivePass* pass);

extern "C" const char* cuda_contrastive_wide(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                             fedkernels::cuda::Stream stream);

// What each loss counts, as a pass takes it: given = u weights with u > 0, so that the finite ones are at most 1 and
// fit half precision. weights is [count + 1] in float32 or float64, u its last entry.
extern "C" const char* cuda_contrastive_weights(const double* given, int64_t count, const fedkernels::Array* weights,
                                                fedkernels::cuda::Stream stream);

// result = (sum of the losses) / divisor, in float64 until the end; both are float32 or float64.
extern "C" const char* cuda_contrastive_sum(const fedkernels::Array* losses, int64_t count, double divisor,
                                            const fedkernels::Array* result, fedkernels::cuda::Stream stream);

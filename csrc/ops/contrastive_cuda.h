// What the CUDA implementations of info_nce and nt_xent share.
#pragma once

#include <algorithm>
#include <string>
#include <type_traits>

#include "cuda/contrastive.h"
#include "ops/contrastive_checks.h"
#include "ops/cuda.h"

namespace fedkernels {

inline void check_contrastive(const Tensor& first, const Tensor& second, const char* names) {
  STD_TORCH_CHECK(first.is_cuda() && second.is_cuda() && first.get_device_index() == second.get_device_index() &&
                      first.is_contiguous() && second.is_contiguous(),
                  names, " must be contiguous and on one device");
  STD_TORCH_CHECK(first.size(0) < (1 << 30) && second.size(0) < (1 << 30) && first.size(1) < (1 << 30), names,
                  " are too large");
}

struct Precision {
  ScalarType rows, sums;  // the sums' is that of the gradients
  bool tensor_cores;
};

// Does the current device have the shared memory for rows of this width on the tensor cores? float32 as tf32.
inline bool fits_tensor_cores(ScalarType dtype, int64_t width) {
  if (dtype == ScalarType::BFloat16) return cuda_contrastive_bfloat16_fits(width);
  return dtype == ScalarType::Half ? cuda_contrastive_float16_fits(width) : cuda_contrastive_tf32_fits(width);
}

// One half precision on the tensor cores where the rows fit, else float64 where an input is that and float32 otherwise,
// as tf32 on the tensor cores if that may be and they fit. The device is the current one.
inline Precision precision_of(const Tensor& first, const Tensor& second, bool tf32) {
  const ScalarType dtype = first.scalar_type(), other = second.scalar_type();
  const bool half = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  if (half && dtype == other && fits_tensor_cores(dtype, first.size(1))) return {dtype, ScalarType::Float, true};
  const bool wide = dtype == ScalarType::Double || other == ScalarType::Double;
  if (wide) return {ScalarType::Double, ScalarType::Double, false};
  return {ScalarType::Float, ScalarType::Float, tf32 && fits_tensor_cores(ScalarType::Float, first.size(1))};
}

// What each loss counts, as a pass takes it, and behind these the unit; empty where all count once.
inline Tensor counts_of(const Tensor* weights, const Tensor& losses, cuda::Stream stream) {
  const int64_t count = losses.numel();
  Tensor counts = memory_on(losses, {weights ? count + 1 : 0}, losses.scalar_type());
  if (!weights) return counts;
  STD_TORCH_CHECK(weights->is_cuda() && weights->get_device_index() == losses.get_device_index() &&
                      weights->is_contiguous() && weights->scalar_type() == ScalarType::Double &&
                      weights->numel() == count,
                  "weights must be float64 on the device of the rows, one for each loss");
  const Array to = {counts.data_ptr(), dtype_of(counts, "losses")};
  check_cuda(cuda_contrastive_weights(static_cast<const double*>(weights->data_ptr()), count, &to, stream));
  return counts;
}

inline void count_by(cuda::ContrastivePass& pass, Tensor& counts) {
  if (!counts.numel()) return;
  pass.row_weight = counts.data_ptr();
  pass.weight_unit = torch::stable::narrow(counts, 0, counts.numel() - 1, 1).data_ptr();
}

inline int64_t memory_of(const cuda::ContrastivePass& pass, bool tensor_cores) {
  const DType dtype = pass.rows.dtype;
  if (!tensor_cores) return cuda_contrastive_wide_memory(&pass);
  if (dtype == DType::bf16) return cuda_contrastive_bfloat16_memory(&pass);
  return dtype == DType::f16 ? cuda_contrastive_float16_memory(&pass) : cuda_contrastive_tf32_memory(&pass);
}

inline const char* launch_pass(const cuda::ContrastivePass& pass, bool tensor_cores, void* memory,
                               cuda::Stream stream) {
  const DType dtype = pass.rows.dtype;
  if (!tensor_cores) return cuda_contrastive_wide(&pass, memory, stream);
  if (dtype == DType::bf16) return cuda_contrastive_bfloat16(&pass, memory, stream);
  return dtype == DType::f16 ? cuda_contrastive_float16(&pass, memory, stream)
                             : cuda_contrastive_tf32(&pass, memory, stream);
}

inline void run_pass(const cuda::ContrastivePass& pass, bool tensor_cores, const Tensor& like, cuda::Stream stream) {
  const Tensor memory = memory_on(like, {(memory_of(pass, tensor_cores) + 3) / 4}, ScalarType::Float);
  check_cuda(launch_pass(pass, tensor_cores, memory.data_ptr(), stream));
}

inline Array gradient_array(const Tensor& gradient) { return {data_or_null(gradient), dtype_of(gradient, "gradient")}; }

inline int64_t entry_bytes(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// What `pass` does for its rows from `start` on; nothing else of it changes.
inline cuda::ContrastivePass rows_of(const cuda::ContrastivePass& pass, int64_t start, int64_t count) {
  cuda::ContrastivePass some = pass;
  const auto move = [start](auto& data, int64_t bytes) {
    using Byte = std::conditional_t<std::is_same_v<decltype(data), void*&>, char, const char>;
    if (data) data = static_cast<Byte*>(data) + start * bytes;
  };
  const int64_t of_sum = entry_bytes(pass.rows.dtype == DType::f64 ? DType::f64 : DType::f32);
  move(some.rows.data, pass.width * entry_bytes(pass.rows.dtype));
  move(some.gradient.data, pass.width * entry_bytes(pass.gradient.dtype));
  for (void** data : {&some.row_largest, &some.row_share, &some.losses}) move(*data, of_sum);
  move(some.row_weight, of_sum);
  some.row_count = count;
  some.shift = pass.shift + start;
  return some;
}

// A pass whose gradient may be narrower than its sums. These need memory then, and so that this stays small the pass goes
// through its rows some at a time, which are enough to keep all multiprocessors at work.
inline void run_pass_by_rows(const cuda::ContrastivePass& pass, bool tensor_cores, const Tensor& like,
                             cuda::Stream stream) {
  const DType of_sums = pass.rows.dtype == DType::f64 ? DType::f64 : DType::f32;
  int64_t step = pass.row_count;
  if (pass.gradient.data && pass.gradient.dtype != of_sums) {
    step = std::max<int64_t>(cuda::CONTRASTIVE_SUMS_AT_A_TIME / pass.width / 128, 1) * 128;
  }
  for (int64_t start = 0; start < pass.row_count; start += step) {
    run_pass(rows_of(pass, start, std::min(step, pass.row_count - start)), tensor_cores, like, stream);
  }
}

inline Tensor reduced_on_cuda(const Tensor& losses, const std::string& reduction) {
  check_reduction(reduction);
  if (reduction == "none") return losses;
  const OnDevice device(losses);
  Tensor result = memory_on(losses, {}, losses.scalar_type());
  const Array from = {losses.data_ptr(), dtype_of(losses, "losses")}, to = {result.data_ptr(), from.dtype};
  const double divisor = divisor_of(reduction, losses);
  check_cuda(cuda_contrastive_sum(&from, losses.numel(), divisor, &to, device.stream()));
  return result;
}

}  // namespace fedkernels

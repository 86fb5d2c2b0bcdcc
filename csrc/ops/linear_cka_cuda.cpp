#include "cuda/linear_cka.h"

#include <tuple>

#include "ops/cuda.h"

namespace fedkernels {

static double* doubles(const Tensor& tensor) { return static_cast<double*>(data_or_null(tensor)); }

// All leading dimensions taken together.
static int64_t problems_of(const Tensor& tensor) {
  int64_t problems = 1;
  for (int64_t i = 0; i < tensor.dim() - 2; ++i) problems *= tensor.size(i);
  return problems;
}

static std::tuple<Tensor, Tensor> linear_cka_prepare_cuda(std::vector<Tensor> matrices, bool centered) {
  const int64_t count = matrices.size();
  STD_TORCH_CHECK(count > 0 && count <= cuda::CKA_MATRICES, "1 to ", cuda::CKA_MATRICES, " matrices can be prepared");
  const OnDevice device(matrices[0]);
  cuda::CKAMatrices given = {};
  given.count = count;
  given.centered = centered;
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& one = matrices[i];
    STD_TORCH_CHECK(one.dim() >= 2, "matrices must have shape [..., L, d]");
    const int64_t rows = one.size(one.dim() - 2), width = one.size(one.dim() - 1);
    if (i == 0) {
      given.problems = problems_of(one);
      given.rows = rows;
    }
    STD_TORCH_CHECK(rows > 0 && width > 0 && rows == given.rows && problems_of(one) == given.problems,
                    "matrices must have the same L and leading dimensions, and columns");
    given.matrices[i] = cuda_array_of(one, "matrices", matrices[0].get_device_index());
    given.widths[i] = width;
    given.wide |= given.matrices[i].dtype == DType::f64;
    total += width;
  }
  const Tensor z = memory_on(matrices[0], {given.problems, given.rows, total}, result_dtype(given.wide));
  const Tensor scales = memory_on(matrices[0], {given.problems, count}, ScalarType::Double);
  const Tensor memory = memory_on(matrices[0], {cuda_linear_cka_prepare_doubles(&given)}, ScalarType::Double);
  check_cuda(
      cuda_linear_cka_prepare(&given, data_or_null(z), doubles(scales), doubles(memory), device.stream()));
  return {z, scales};
}

// A product is [problems, rows, columns] of the first one's dtype.
static void check_product(const Tensor& tensor, const char* name, const Tensor& first, int64_t rows, int64_t columns) {
  const Array array = cuda_array_of(tensor, name, first.get_device_index());
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == first.size(0) && tensor.size(1) == rows &&
                      tensor.size(2) == columns && tensor.scalar_type() == first.scalar_type() &&
                      (array.dtype == DType::f32 || array.dtype == DType::f64),
                  name, " must be float32 or float64 [", first.size(0), ", ", rows, ", ", columns, "], as the others");
}

static std::tuple<Tensor, Tensor, Tensor> linear_cka_combine_cuda(Tensor own, Tensor other, Tensor scales, bool samples,
                                                                  bool x_gradient, bool y_gradient) {
  STD_TORCH_CHECK(own.dim() == 3 && other.dim() == 3, "own and other must be [problems, rows, columns]");
  const OnDevice device(own);
  const int64_t problems = own.size(0), x_width = own.size(2), y_width = other.size(2);
  check_product(own, "own", own, samples ? x_width : x_width + y_width, x_width);
  check_product(other, "other", own, y_width, y_width);
  STD_TORCH_CHECK(!samples || x_width == y_width, "own and other must have the same shape in sample space");
  const Array of_scales = cuda_array_of(scales, "scales", own.get_device_index());
  STD_TORCH_CHECK(of_scales.dtype == DType::f64 && scales.numel() == problems * 2, "scales must be float64 of ",
                  problems * 2, " numbers");
  const ScalarType dtype = own.scalar_type();
  const auto factors = [&](int64_t width, bool wanted) {
    const std::vector<int64_t> shape = {problems, samples ? width : x_width + y_width, width};
    return memory_on(own, wanted ? shape : std::vector<int64_t>{0}, dtype);
  };
  const Tensor values = memory_on(own, {problems}, dtype);
  const Tensor of_x = factors(x_width, x_gradient), of_y = factors(y_width, y_gradient);
  const cuda::CKAProducts products = {data_or_null(own), data_or_null(other), problems, x_width, x_width, y_width,
                                      samples, dtype == ScalarType::Double, doubles(scales), data_or_null(values),
                                      data_or_null(of_x), data_or_null(of_y)};
  const Tensor memory = memory_on(own, {cuda_linear_cka_combine_doubles(&products)}, ScalarType::Double);
  check_cuda(cuda_linear_cka_combine(&products, doubles(memory), device.stream()));
  return {values, of_x, of_y};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) {
  m.impl("linear_cka_prepare", TORCH_BOX(&linear_cka_prepare_cuda));
  m.impl("linear_cka_combine", TORCH_BOX(&linear_cka_combine_cuda));
}

}  // namespace fedkernels

#include "cuda/linear_cka_large.h"

#include <tuple>

#include "ops/cuda.h"

namespace fedkernels {

static double* doubles(const Tensor& tensor) { return static_cast<double*>(data_or_null(tensor)); }

// Of the matrices' sizes the first `batch` dimensions, taken together.
static int64_t problems_of(const Tensor& tensor) {
  int64_t problems = 1;
  for (int64_t i = 0; i < tensor.dim() - 2; ++i) problems *= tensor.size(i);
  return problems;
}

static cuda::CKAMatrices describe(const std::vector<Tensor>& matrices, bool centered) {
  const int64_t count = matrices.size();
  STD_TORCH_CHECK(count > 0 && count <= cuda::CKA_MATRICES, "1 to ", cuda::CKA_MATRICES, " matrices can be prepared");
  cuda::CKAMatrices given = {};
  given.count = count;
  given.centered = centered;
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
  }
  return given;
}

// More matrices than one call takes, as linear_cka_pairwise has them, are written side by side by several.
static std::tuple<Tensor, Tensor> linear_cka_prepare_cuda(std::vector<Tensor> matrices, bool centered) {
  STD_TORCH_CHECK(!matrices.empty(), "matrices must not be empty");
  const OnDevice device(matrices[0]);
  const int64_t count = matrices.size();
  int64_t width = 0;
  bool wide = false;
  for (const Tensor& one : matrices) {
    STD_TORCH_CHECK(one.dim() >= 2, "matrices must have shape [..., L, d]");
    width += one.size(one.dim() - 1);
    wide |= one.scalar_type() == ScalarType::Double;
  }
  const int64_t problems = problems_of(matrices[0]), rows = matrices[0].size(matrices[0].dim() - 2);
  const bool several = count > cuda::CKA_MATRICES;
  STD_TORCH_CHECK(!several || problems == 1, "many matrices cannot have leading dimensions");
  const Tensor z = memory_on(matrices[0], {problems, rows, width}, result_dtype(wide));
  const Tensor scales = memory_on(matrices[0], {problems, count}, ScalarType::Double);
  int64_t column = 0;
  for (int64_t start = 0; problems > 0 && start < count; start += cuda::CKA_MATRICES) {
    const int64_t end = std::min<int64_t>(start + cuda::CKA_MATRICES, count);
    cuda::CKAMatrices given = describe({matrices.begin() + start, matrices.begin() + end}, centered);
    STD_TORCH_CHECK(given.rows == rows && given.problems == problems,
                    "matrices must have the same L and leading dimensions");
    given.wide = wide;
    const Tensor memory = memory_on(matrices[0], {cuda_linear_cka_prepare_doubles(&given)}, ScalarType::Double);
    check_cuda(cuda_linear_cka_prepare(&given, static_cast<char*>(z.data_ptr()) + column * z.element_size(), width,
                                       doubles(scales) + start, doubles(memory), device.stream()));
    for (int64_t i = 0; i < given.count; ++i) column += given.widths[i];
  }
  return {z, scales};
}

static std::tuple<Tensor, Tensor, Tensor> linear_cka_prepare_to_kernel_cuda(Tensor x, Tensor kernel, bool centered) {
  const OnDevice device(x);
  const cuda::CKAMatrices given = describe({x, kernel}, centered);
  STD_TORCH_CHECK(given.widths[1] == given.rows, "kernel must be [..., L, L] for the L rows of x");
  const Tensor z = memory_on(x, {given.problems, given.rows, given.widths[0]}, result_dtype(given.wide));
  const Tensor scales = memory_on(x, {given.problems, 4}, ScalarType::Double);
  const int64_t side = centered ? given.rows : 0;
  const Tensor centred = memory_on(x, {given.problems, side, side}, result_dtype(given.wide));
  if (given.problems > 0) {
    const Tensor memory = memory_on(x, {cuda_linear_cka_prepare_to_kernel_doubles(&given)}, ScalarType::Double);
    check_cuda(cuda_linear_cka_prepare_to_kernel(&given, z.data_ptr(), data_or_null(centred), doubles(scales),
                                                 doubles(memory), device.stream()));
  }
  return {z, scales, centred};
}

// A product is [problems, rows, columns] of the first one's dtype.
static void check_product(const Tensor& tensor, const char* name, const Tensor& first, int64_t problems, int64_t rows,
                          int64_t columns) {
  const Array array = cuda_array_of(tensor, name, first.get_device_index());
  STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == problems && tensor.size(1) == rows &&
                      tensor.size(2) == columns && tensor.scalar_type() == first.scalar_type() &&
                      (array.dtype == DType::f32 || array.dtype == DType::f64),
                  name, " must be float32 or float64 [", problems, ", ", rows, ", ", columns, "], as the others");
}

static void check_scales(const Tensor& scales, const Tensor& first, int64_t problems, int64_t count) {
  const Array array = cuda_array_of(scales, "scales", first.get_device_index());
  STD_TORCH_CHECK(array.dtype == DType::f64 && scales.numel() == problems * count, "scales must be float64 of ",
                  problems * count, " numbers");
}

static std::tuple<Tensor, Tensor, Tensor> linear_cka_combine_cuda(Tensor own, Tensor other, Tensor scales, bool samples,
                                                                  bool x_gradient, bool y_gradient) {
  STD_TORCH_CHECK(own.dim() == 3 && other.dim() == 3, "own and other must be [problems, rows, columns]");
  const OnDevice device(own);
  const int64_t problems = own.size(0), x_width = own.size(2), y_width = other.size(2);
  check_product(own, "own", own, problems, samples ? x_width : x_width + y_width, x_width);
  check_product(other, "other", own, problems, y_width, y_width);
  STD_TORCH_CHECK(!samples || x_width == y_width, "own and other must have the same shape in sample space");
  check_scales(scales, own, problems, 2);
  const ScalarType dtype = own.scalar_type();
  const bool wide = dtype == ScalarType::Double;
  const auto factors = [&](int64_t width, bool wanted) {
    const std::vector<int64_t> shape = {problems, samples ? width : x_width + y_width, width};
    return memory_on(own, wanted ? shape : std::vector<int64_t>{0}, dtype);
  };
  const Tensor values = memory_on(own, {problems}, dtype);
  const Tensor of_x = factors(x_width, x_gradient), of_y = factors(y_width, y_gradient);
  if (problems > 0) {
    const Tensor memory = memory_on(own, {cuda_linear_cka_combine_doubles(problems)}, ScalarType::Double);
    const cuda::CKAProducts products = {own.data_ptr(),  other.data_ptr(),  problems,           x_width,
                                        x_width,         y_width,           samples,            wide,
                                        doubles(scales), values.data_ptr(), data_or_null(of_x), data_or_null(of_y)};
    check_cuda(cuda_linear_cka_combine(&products, doubles(memory), device.stream()));
  }
  return {values, of_x, of_y};
}

static Tensor linear_cka_combine_to_kernel_cuda(Tensor product, Tensor own, Tensor z, Tensor scales, bool gradient) {
  STD_TORCH_CHECK(z.dim() == 3 && own.dim() == 3, "z and own must be [problems, rows, columns]");
  const OnDevice device(z);
  const int64_t problems = z.size(0), rows = z.size(1), width = z.size(2), side = own.size(1);
  check_product(z, "z", z, problems, rows, width);
  check_product(product, "product", z, problems, rows, width);
  check_product(own, "own", z, problems, side, side);
  check_scales(scales, z, problems, 4);
  const bool wide = z.scalar_type() == ScalarType::Double;
  const Tensor values = memory_on(z, {problems}, z.scalar_type());
  if (problems > 0) {
    const Tensor memory = memory_on(z, {cuda_linear_cka_combine_doubles(problems)}, ScalarType::Double);
    const cuda::CKAToKernelProducts products = {z.data_ptr(), product.data_ptr(), own.data_ptr(),  problems,
                                                rows,         width,              side,            wide,
                                                gradient,     doubles(scales),    values.data_ptr()};
    check_cuda(cuda_linear_cka_combine_to_kernel(&products, doubles(memory), device.stream()));
  }
  return values;
}

static Tensor linear_cka_squares_cuda(Tensor product, std::vector<int64_t> lengths) {
  const OnDevice device(product);
  const int64_t count = lengths.size();
  const Array array = cuda_array_of(product, "product", product.get_device_index());
  STD_TORCH_CHECK(array.dtype == DType::f32 || array.dtype == DType::f64, "product must be float32 or float64");
  int64_t total = 0;
  for (const int64_t length : lengths) {
    STD_TORCH_CHECK(length >= 0, "lengths must not be negative");
    total += length;
  }
  STD_TORCH_CHECK(count > 0 && count <= cuda::CKA_SEGMENTS && total <= product.numel(), "1 to ", cuda::CKA_SEGMENTS,
                  " lengths that product has");
  const Tensor squares = memory_on(product, {count}, ScalarType::Double);
  const Tensor memory = memory_on(product, {cuda_linear_cka_squares_doubles(count)}, ScalarType::Double);
  check_cuda(cuda_linear_cka_squares(array.data, array.dtype == DType::f64, lengths.data(), count, doubles(squares),
                                     doubles(memory), device.stream()));
  return squares;
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) {
  m.impl("linear_cka_prepare", TORCH_BOX(&linear_cka_prepare_cuda));
  m.impl("linear_cka_prepare_to_kernel", TORCH_BOX(&linear_cka_prepare_to_kernel_cuda));
  m.impl("linear_cka_combine", TORCH_BOX(&linear_cka_combine_cuda));
  m.impl("linear_cka_combine_to_kernel", TORCH_BOX(&linear_cka_combine_to_kernel_cuda));
  m.impl("linear_cka_squares", TORCH_BOX(&linear_cka_squares_cuda));
}

}  // namespace fedkernels

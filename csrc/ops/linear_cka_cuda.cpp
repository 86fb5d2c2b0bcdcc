#include "cuda/linear_cka.h"

#include <tuple>

#include "ops/cuda.h"

namespace fedkernels {

// As on the CPU, but for small matrices that are no float64, and x and y have the same leading dimensions.
static std::tuple<Tensor, Tensor, Tensor> linear_cka_cuda(Tensor x, Tensor y, bool centered, bool x_gradient,
                                                          bool y_gradient) {
  const int64_t ndim = x.dim();
  STD_TORCH_CHECK(ndim >= 2 && y.dim() == ndim, "x and y must have shapes [..., L, d1] and [..., L, d2]");
  std::vector<int64_t> batch;
  int64_t problems = 1;
  for (int64_t i = 0; i < ndim - 2; ++i) {
    STD_TORCH_CHECK(x.size(i) == y.size(i), "x and y must have the same leading dimensions on CUDA");
    batch.push_back(x.size(i));
    problems *= batch.back();
  }
  const int64_t rows = x.size(ndim - 2), x_width = x.size(ndim - 1), y_width = y.size(ndim - 1);
  STD_TORCH_CHECK(rows == y.size(ndim - 2) && rows > 0 && rows <= cuda::CKA_ROWS, "L must be 1 to ", cuda::CKA_ROWS);
  STD_TORCH_CHECK(x_width > 0 && y_width > 0 && x_width <= cuda::CKA_WIDTH && y_width <= cuda::CKA_WIDTH,
                  "d1 and d2 must be 1 to ", cuda::CKA_WIDTH);
  const OnDevice device(x);
  const int32_t index = x.get_device_index();
  const Array xs = cuda_array_of(x, "x", index), ys = cuda_array_of(y, "y", index);
  STD_TORCH_CHECK(xs.dtype != DType::f64 && ys.dtype != DType::f64, "x and y must not be float64 on CUDA");

  const auto floats = [](const Tensor& tensor) { return static_cast<float*>(data_or_null(tensor)); };
  const auto gradient = [&](int64_t width, bool wanted) {
    std::vector<int64_t> shape = batch;
    shape.insert(shape.end(), {rows, width});
    return memory_on(x, wanted ? shape : std::vector<int64_t>{0}, ScalarType::Float);
  };
  Tensor values = memory_on(x, batch, ScalarType::Float);
  Tensor of_x = gradient(x_width, x_gradient), of_y = gradient(y_width, y_gradient);
  if (problems > 0) {
    const cuda::CKAProblems given = {xs,       ys,             problems,     rows,        x_width, y_width,
                                     centered, floats(values), floats(of_x), floats(of_y)};
    const Tensor memory = memory_on(x, {cuda_linear_cka_floats(&given)}, ScalarType::Float);
    check_cuda(cuda_linear_cka(&given, floats(memory), device.stream()));
  }
  return {values, of_x, of_y};
}

STABLE_TORCH_LIBRARY_IMPL(fedkernels, CUDA, m) { m.impl("linear_cka", TORCH_BOX(&linear_cka_cuda)); }

}  // namespace fedkernels

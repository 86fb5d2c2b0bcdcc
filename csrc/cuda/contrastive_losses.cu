// What stands before and after the contrastive passes: the weights of the losses, brought to at most 1, and the sum of
// the losses or their mean.
#include "cuda/contrastive.h"

#include "cuda/dtype.h"
#include "cuda/launch.h"
#include "cuda/reduce.h"

namespace fedkernels::cuda {

namespace {

constexpr int SUM_THREADS = 1024;

// One block: the sum of all losses, or their mean.
__global__ void __launch_bounds__(SUM_THREADS) sum_kernel(Array losses, int64_t count, double divisor, Array result) {
  SHARED(of_warps, double[SUM_THREADS / 32]);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) sum += read_one(losses, i);
  sum = block_reduce(sum, of_warps, Sum());
  if (threadIdx.x == 0) write_one(result, 0, sum / divisor);
}

// One block. A weight that is not finite stays what it is.
template <typename Number>
__global__ void __launch_bounds__(SUM_THREADS) weights_kernel(const double* given, int64_t count, Number* weights) {
  SHARED(of_warps, double[SUM_THREADS / 32]);
  double largest = 0;
  for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) {
    const double size = fabs(given[i]);
    if (size < INFINITY) largest = fmax(largest, size);
  }
  largest = block_reduce(largest, of_warps, Greatest());
  const double unit = largest > 0 ? largest : 1;
  for (int64_t i = threadIdx.x; i < count; i += SUM_THREADS) weights[i] = static_cast<Number>(given[i] / unit);
  if (threadIdx.x == 0) weights[count] = static_cast<Number>(unit);
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" const char* cuda_contrastive_sum(const fedkernels::Array* losses, int64_t count, double divisor,
                                            const fedkernels::Array* result, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  return launch({dim3(1), dim3(SUM_THREADS)}, stream, sum_kernel, *losses, count, divisor, *result);
}

extern "C" const char* cuda_contrastive_weights(const double* given, int64_t count, const fedkernels::Array* weights,
                                                fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  const Shape shape = {dim3(1), dim3(SUM_THREADS)};
  return weights->dtype == fedkernels::DType::f64
             ? launch(shape, stream, weights_kernel<double>, given, count, static_cast<double*>(weights->data))
             : launch(shape, stream, weights_kernel<float>, given, count, static_cast<float*>(weights->data));
}

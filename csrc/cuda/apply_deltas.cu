// Bound by memory: every entry is read once and the global one written once, four neighbours a thread. The sums are the
// reference's in its order, in float64 without fused multiply-add: equal to the last bit.
#include "cuda/apply_deltas.h"

#include "cuda/dtype.h"
#include "cuda/parameter_lists.h"

namespace fedkernels::cuda {

namespace {

constexpr int THREADS = 256;
constexpr int64_t CHUNK = 4 * THREADS;
constexpr int MOST_BLOCKS = 1 << 16;

// How entries are read: all versions of the tensor have one dtype, or each its own.
template <typename T>
struct Uniform {
  __device__ static void read(double (&values)[4], const Array& array, int64_t start, int count) {
    read_four(values, static_cast<const T*>(array.data), start, count);
  }
};
struct Mixed {
  __device__ static void read(double (&values)[4], const Array& array, int64_t start, int count) {
    read_four(values, array, start, count);
  }
};

template <typename Source>
__device__ inline void step(const Array* arrays, int64_t clients, const double* weights, int64_t start, int count) {
  double base[4], client[4], sum[4] = {};
  Source::read(base, arrays[0], start, count);
#pragma unroll 4
  for (int64_t k = 0; k < clients; ++k) {
    const double weight = weights[k];
    Source::read(client, arrays[k + 1], start, count);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] = __dadd_rn(sum[i], __dmul_rn(weight, __dsub_rn(base[i], client[i])));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) base[i] = __dsub_rn(base[i], sum[i]);
  write_four(arrays[0], start, base, count);
}

__global__ void __launch_bounds__(THREADS) apply_deltas_kernel(DeviceLists lists) {
  const double* weights = lists.weights;
  for (int64_t index = blockIdx.x; index < lists.chunks; index += gridDim.x) {
    const DeviceLists::Piece piece = lists.piece(index);
    const int offset = 4 * static_cast<int>(threadIdx.x), count = piece.count - offset;
    if (count <= 0) continue;
    const int64_t start = piece.start + offset;
    const Array* arrays = piece.arrays;
    switch (piece.dtype) {
      case static_cast<int>(DType::f64):
        step<Uniform<double>>(arrays, lists.clients, weights, start, count);
        break;
      case static_cast<int>(DType::f32):
        step<Uniform<float>>(arrays, lists.clients, weights, start, count);
        break;
      case static_cast<int>(DType::bf16):
        step<Uniform<BFloat>>(arrays, lists.clients, weights, start, count);
        break;
      case static_cast<int>(DType::f16):
        step<Uniform<Half>>(arrays, lists.clients, weights, start, count);
        break;
      default:
        step<Mixed>(arrays, lists.clients, weights, start, count);
    }
  }
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" const char* cuda_apply_deltas(const fedkernels::Array* arrays, const int64_t* sizes, int64_t tensors,
                                         int64_t clients, const double* weights, int64_t* words,
                                         fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  DeviceLists lists;
  const char* error = send_lists({arrays, sizes, tensors, clients, weights}, CHUNK, words, stream, &lists);
  if (error) return error;
  if (lists.chunks == 0) return nullptr;
  const unsigned blocks = static_cast<unsigned>(lists.chunks < MOST_BLOCKS ? lists.chunks : MOST_BLOCKS);
  return launch({blocks, THREADS}, stream, apply_deltas_kernel, lists);
}

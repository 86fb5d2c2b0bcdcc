// Bound by memory: every entry is read once and the global one written once. The sums are the reference's in its order, in
// float64 without fused multiply-add: equal to the last bit.
#include "cuda/apply_deltas.h"

#include "cuda/dtype.h"
#include "cuda/parameter_lists.h"

namespace fedkernels::cuda {

namespace {

constexpr int THREADS = 256;
constexpr int64_t CHUNK = 4 * THREADS;  // entries
constexpr int MOST_BLOCKS = 1 << 16;
// Blocks of a multiprocessor. With room for more the compiler saves registers by loading client after client.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int BLOCKS = 2;
#else
constexpr int BLOCKS = 3;
#endif
constexpr int BYTES_AT_A_TIME = 64;  // of a thread: vectors of several clients are on their way together

// entry <- entry - sum_k weight_k (entry - client_k), a step of which is `add`.
__device__ inline double add(double sum, double weight, double base, double client) {
  return __dadd_rn(sum, __dmul_rn(weight, __dsub_rn(base, client)));
}

// Up to four neighbours, whatever the dtypes of their versions and wherever these lie.
__device__ inline void update_four(const Array* arrays, int64_t clients, const double* weights, int64_t start,
                                   int count) {
  double base[4], client[4], sums[4] = {};
  read_four(base, arrays[0], start, count);
#pragma unroll 1
  for (int64_t k = 0; k < clients; ++k) {
    read_four(client, arrays[k + 1], start, count);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], weights[k], base[i], client[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) base[i] = __dsub_rn(base[i], sums[i]);
  write_four(arrays[0], start, base, count);
}

// The entries of one vector from `start` on, of a tensor that piece() calls aligned. Nothing but the number of clients
// decides about a branch, so that the loads of AT_A_TIME clients are issued before the first is waited for.
template <typename T>
__device__ inline void update_vector(const Array* arrays, int64_t clients, const double* weights, int64_t start) {
  constexpr int LENGTH = Vector<T>::LENGTH, AT_A_TIME = BYTES_AT_A_TIME / sizeof(Vector<T>);
  const auto at = [&](int64_t version) {
    return reinterpret_cast<Vector<T>*>(static_cast<T*>(arrays[version].data) + start);
  };
  Vector<T> result = read_once(at(0));
  double base[LENGTH], sums[LENGTH] = {};
#pragma unroll
  for (int i = 0; i < LENGTH; ++i) base[i] = widen(result.values[i]);
  const auto add_client = [&](const Vector<T>& client, double weight) {
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) sums[i] = add(sums[i], weight, base[i], widen(client.values[i]));
  };
  int64_t k = 0;
#pragma unroll 1
  for (; k + AT_A_TIME <= clients; k += AT_A_TIME) {
    Vector<T> some[AT_A_TIME];
#pragma unroll
    for (int n = 0; n < AT_A_TIME; ++n) some[n] = read_once(at(1 + k + n));
#pragma unroll
    for (int n = 0; n < AT_A_TIME; ++n) add_client(some[n], weights[k + n]);
  }
#pragma unroll 1
  for (; k < clients; ++k) add_client(read_once(at(1 + k)), weights[k]);
#pragma unroll
  for (int i = 0; i < LENGTH; ++i) narrow(__dsub_rn(base[i], sums[i]), &result.values[i]);
  write_once(at(0), result);
}

// A thread's part of the entries of a piece that vectors serve. -> how many these are, from the first on
template <typename T>
__device__ inline int update_vectors(const DeviceLists::Piece& piece, int64_t clients, const double* weights) {
  constexpr int LENGTH = Vector<T>::LENGTH;
  const int whole = piece.count / LENGTH * LENGTH;
#pragma unroll 1
  for (int i = threadIdx.x * LENGTH; i < whole; i += THREADS * LENGTH) {
    update_vector<T>(piece.arrays, clients, weights, piece.start + i);
  }
  return whole;
}

__global__ void __launch_bounds__(THREADS, BLOCKS) apply_deltas_kernel(DeviceLists lists) {
  for (int64_t index = blockIdx.x; index < lists.chunks; index += gridDim.x) {
    const DeviceLists::Piece piece = lists.piece(index);
    int done = 0;
    switch (piece.aligned ? piece.dtype : MIXED) {
      case static_cast<int>(DType::f64):
        done = update_vectors<double>(piece, lists.clients, lists.weights);
        break;
      case static_cast<int>(DType::f32):
        done = update_vectors<float>(piece, lists.clients, lists.weights);
        break;
      case static_cast<int>(DType::bf16):
        done = update_vectors<BFloat>(piece, lists.clients, lists.weights);
        break;
      case static_cast<int>(DType::f16):
        done = update_vectors<Half>(piece, lists.clients, lists.weights);
        break;
    }
#pragma unroll 1
    for (int i = done + 4 * threadIdx.x; i < piece.count; i += 4 * THREADS) {
      update_four(piece.arrays, lists.clients, lists.weights, piece.start + i, piece.count - i);
    }
  }
}

}  // namespace

}  // namespace fedkernels::cuda

extern "C" const char* cuda_apply_deltas(const fedkernels::Array* arrays, const int64_t* sizes, int64_t tensors,
                                         int64_t clients, const double* weights, const double* weights_on_device,
                                         int64_t* words, fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  DeviceLists lists;
  const char* error = send_lists({arrays, sizes, tensors, clients, weights}, CHUNK, words, stream, &lists);
  if (error) return error;
  if (lists.chunks == 0) return nullptr;
  if (weights_on_device) lists.weights = weights_on_device;
  const unsigned blocks = static_cast<unsigned>(lists.chunks < MOST_BLOCKS ? lists.chunks : MOST_BLOCKS);
  return launch({blocks, THREADS}, stream, apply_deltas_kernel, lists);
}

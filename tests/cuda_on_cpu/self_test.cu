// Kernels that try the emulation itself: test_emulation.py plants faults in them.
#include "cuda/launch.h"
#include "cuda/ptx.h"

namespace fedkernels::cuda {

namespace {

// to[block] = the sum of the block's 256 values, by shuffles and then over the warps.
__global__ void sum_blocks(const float* from, float* to, int count) {
  SHARED(of_warps, float[8]);
  const int index = blockIdx.x * 256 + threadIdx.x;
  float value = index < count ? from[index] : 0;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();  // before the sums are read
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < 8; ++warp) value += of_warps[warp];
    to[blockIdx.x] = value;
  }
}

// Shuffles and votes of every kind, one warp.
__global__ void lanes(int* to) {
  const int lane = threadIdx.x;
  to[lane] = __shfl_sync(0xffffffff, 10 * lane, lane / 2);
  // Two halves on their own ways.
  if (lane < 16) {
    to[32 + lane] = __shfl_xor_sync(0x0000ffff, lane, 1);
    __syncwarp(0x0000ffff);
  } else {
    __syncwarp(0xffff0000);
    to[32 + lane] = __any_sync(0xffff0000, lane == 20) + 2 * __any_sync(0xffff0000, lane == 2);
  }
  to[64 + lane] = __syncthreads_count(lane < 7);
}

// c [16, 8] = a [16, 16] b [16, 8]; b is given as its transpose [8, 16] where `transposed`. 16-bit entries.
template <bool HALF>
__global__ void product_16(const uint16_t* a, const uint16_t* b, float* c, bool transposed) {
  uint16_t* of_a = dynamic_shared<uint16_t>();  // [16, 16], then b
  uint16_t* of_b = of_a + 256;
  const int lane = threadIdx.x;
  copy_async(of_a + 8 * lane, a + 8 * lane);
  if (lane < 16) copy_async(of_b + 8 * lane, b + 8 * lane);
  copy_async_commit();
  copy_async_wait<0>();
  __syncwarp();
  uint32_t of_lane[4], columns[4];
  load_matrices(of_lane, of_a + lane % 16 * 16 + lane / 16 * 8);  // rows, rows + 8, then columns + 8
  if (transposed) {
    load_matrices(columns, of_b + lane % 8 * 16 + lane / 8 % 2 * 8);
  } else {
    load_matrices_transposed(columns, of_b + lane % 16 * 8);
  }
  float sums[4] = {};
  const uint32_t right[2] = {columns[0], columns[1]};
  HALF ? mma_half(sums, of_lane, right) : mma_bfloat(sums, of_lane, right);
  const int row = lane / 4, column = 2 * (lane % 4);
  for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];
}

// Every block writes, all wait, every block reads its right neighbour's. Twice.
__global__ void around(int* values, unsigned long long* counter) {
  const unsigned next = (blockIdx.x + 1) % gridDim.x;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) atomicAdd(values + blockIdx.x, 1);
    barrier_of_blocks(counter, gridDim.x);
    const int seen = __ldcg(values + next);
    barrier_of_blocks(counter, gridDim.x);
    if (threadIdx.x == 0) values[blockIdx.x] = 10 * seen;
    barrier_of_blocks(counter, gridDim.x);
  }
}

// What a float becomes in 16 bits.
__global__ void convert(const float* from, uint32_t* to, int count) {
  const int i = threadIdx.x;
  if (i >= count) return;
  to[3 * i] = pack_half(from[i], -from[i]);
  to[3 * i + 1] = pack_bfloat(from[i], -from[i]);
  to[3 * i + 2] = __float_as_uint(half_to_float(float_to_half(from[i])) + bfloat_to_float(float_to_bfloat(from[i])));
}

}  // namespace

}  // namespace fedkernels::cuda

using namespace fedkernels::cuda;

extern "C" const char* self_sum_blocks(const float* from, float* to, int count, Stream stream) {
  const unsigned blocks = (count + 255) / 256;
  return launch({blocks, 256}, stream, sum_blocks, from, to, count);
}
extern "C" const char* self_lanes(int* to, Stream stream) { return launch({1, 32}, stream, lanes, to); }
extern "C" const char* self_product_16(const uint16_t* a, const uint16_t* b, float* c, int half, bool transposed,
                                       Stream stream) {
  return launch({1, 32, 768}, stream, half ? product_16<true> : product_16<false>, a, b, c, transposed);
}
extern "C" const char* self_around(int* values, unsigned long long* counter, int blocks, Stream stream) {
  return launch({static_cast<unsigned>(blocks), 64, 0, true}, stream, around, values, counter);
}
extern "C" const char* self_convert(const float* from, uint32_t* to, int count, Stream stream) {
  return launch({1, 256}, stream, convert, from, to, count);
}

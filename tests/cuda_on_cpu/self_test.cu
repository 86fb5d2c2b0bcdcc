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

// c [16, 8] = a [16, 16] b [16, 8] in bfloat16.
__global__ void product_16(const uint16_t* a, const uint16_t* b, float* c) {
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
  load_matrices_transposed(columns, of_b + lane % 16 * 8);
  float sums[4] = {};
  const uint32_t right[2] = {columns[0], columns[1]};
  mma_bfloat(sums, of_lane, right);
  const int row = lane / 4, column = 2 * (lane % 4);
  for (int i = 0; i < 4; ++i) c[(row + i / 2 * 8) * 8 + column + i % 2] = sums[i];
}

}  // namespace

}  // namespace fedkernels::cuda

using namespace fedkernels::cuda;

extern "C" const char* self_sum_blocks(const float* from, float* to, int count, Stream stream) {
  const unsigned blocks = (count + 255) / 256;
  return launch({blocks, 256}, stream, sum_blocks, from, to, count);
}
extern "C" const char* self_product_16(const uint16_t* a, const uint16_t* b, float* c, Stream stream) {
  return launch({1, 32, 768}, stream, product_16, a, b, c);
}

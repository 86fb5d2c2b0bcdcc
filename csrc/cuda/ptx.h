// The instructions that C++ has no name for. tests/cuda_on_cpu has its own header of this name, which does the same in
// plain C++: whoever adds a function here adds its twin there.
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

namespace fedkernels::cuda {

// ---- half precision: the 16 bits as they lie in memory ----

__device__ inline float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ inline float bfloat_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

__device__ inline uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ inline uint16_t float_to_bfloat(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two values in one register, the first in the lower half.
__device__ inline uint32_t pack_half(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

__device__ inline uint32_t pack_bfloat(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// 2^x to 2 units in the last place, in one instruction; results below the normal numbers are 0.
__device__ inline float exp2_approximate(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// ---- asynchronous copies from global to shared memory ----

__device__ inline unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// 16 bytes, at addresses that are multiples of 16. Of the source `valid` bytes are read, the others become 0; with
// valid = 0 the source may be any aligned address. They are there after copy_async_wait, for the thread that copied; for
// others after a barrier that follows it.
__device__ inline void copy_async(void* shared, const void* global, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
               : "memory");
}

// Closes a group of copies.
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's groups are under way.
template <int PENDING>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- fragments: lane = 4 g + t, each register two 16-bit values ----

// Four 8 x 8 matrices of 16-bit values. Lane i gives the address of row i % 8 of matrix i / 8, 16 bytes that are
// aligned; register m is row g, columns 2t and 2t + 1 of matrix m.
__device__ inline void load_matrices(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// Four of them, transposed: register m is column g, rows 2t and 2t + 1 of matrix m.
__device__ inline void load_matrices_transposed(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared_address(row))
               : "memory");
}

// sums [16, 8] += a [16, 16] b [16, 8] in float32.
//   a[0]: row g, columns 2t and 2t + 1; a[1]: row g + 8; a[2]: row g, columns 2t + 8 and 2t + 9;
//   a[3]: row g + 8, the same
//   b[0]: rows 2t and 2t + 1, column g; b[1]: rows 2t + 8 and 2t + 9
//   sums[0], sums[1]: row g, columns 2t and 2t + 1; sums[2], sums[3]: row g + 8
__device__ inline void mma_bfloat(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ inline void mma_half(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- blocks of a cooperative launch ----

// Waits until `blocks` blocks have arrived; what they wrote before to global memory is seen after, but by loads that go
// past the first-level cache (__ldcg, volatile or atomic). `counter` starts at 0, is theirs alone, and has 64 bits: a
// long series of problems waits more than 2^32 times.
__device__ inline void barrier_of_blocks(unsigned long long* counter, unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned long long target = (atomicAdd(counter, 1ull) / blocks + 1) * blocks;
    unsigned long long arrived;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(arrived) : "l"(counter) : "memory");
    } while (arrived < target);
    __threadfence();
  }
  __syncthreads();
}

// ---- for the compiler ----

// The value as it is. What is formed from it is formed after this place, and not before a loop around it: addresses
// that are kept for long take the registers of what is computed.
template <typename T>
__device__ inline T* keep_here(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
__device__ inline int keep_here(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace fedkernels::cuda

// The twin of csrc/cuda/ptx.h: the same functions in plain C++.
#pragma once

#include <cuda_runtime.h>

namespace cuda_on_cpu {

// Copies of this thread are done when they are waited for, and not before.
void copy_later(void* to, const void* from, int bytes, int valid);
void close_copies();
void wait_for_copies(int pending);

// Lets the other threads go on until *counter >= target.
void wait_for(const unsigned long long* counter, unsigned long long target);

}  // namespace cuda_on_cpu

namespace fedkernels::cuda {

inline float half_to_float(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}

inline float bfloat_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_half(float value) {
  const _Float16 narrow = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &narrow, 2);
  return value != value ? 0x7fff : bits;
}

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = __float_as_uint(value);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline uint32_t pack_half(float first, float second) {
  return float_to_half(first) | static_cast<uint32_t>(float_to_half(second)) << 16;
}

inline uint32_t pack_bfloat(float first, float second) {
  return float_to_bfloat(first) | static_cast<uint32_t>(float_to_bfloat(second)) << 16;
}

inline float exp2_approximate(float x) {
  const float value = exp2f(x);
  return fabsf(value) < 0x1p-126f ? 0 : value;  // NaN stays NaN
}

inline void copy_async(void* shared, const void* global, int valid = 16) {
  cuda_on_cpu::copy_later(shared, global, 16, valid);
}
inline void copy_async_commit() { cuda_on_cpu::close_copies(); }
template <int PENDING>
void copy_async_wait() {
  cuda_on_cpu::wait_for_copies(PENDING);
}

namespace on_cpu {

inline void load_matrices(uint32_t (&fragment)[4], const void* row, bool transposed) {
  struct Row {
    uint16_t values[8];
  } mine;
  if (reinterpret_cast<uintptr_t>(row) % 16) cuda_on_cpu::fail("load_matrices: a row is not aligned to 16 bytes");
  memcpy(&mine, row, 16);
  const char* slots = cuda_on_cpu::exchange(0xffffffff, "load_matrices", &mine, sizeof(mine));
  const unsigned g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uint32_t pair[2];
    for (unsigned i = 0; i < 2; ++i) {
      const unsigned of_row = transposed ? 2 * t + i : g, column = transposed ? g : 2 * t + i;
      pair[i] = cuda_on_cpu::of_lane<Row>(slots, 8 * matrix + of_row).values[column];
    }
    fragment[matrix] = pair[0] | pair[1] << 16;
  }
}

struct Operands {
  uint32_t a[4], b[2];
};

// Sums [16, 8] += a [16, depth] b [depth, 8]; a_at(slots, row, k) and b_at(slots, k, column) find the entries.
template <typename A, typename B>
void mma(float (&sums)[4], const Operands& mine, const char* operation, int depth, A a_at, B b_at) {
  const char* slots = cuda_on_cpu::exchange(0xffffffff, operation, &mine, sizeof(mine));
  const unsigned g = cuda_on_cpu::lane() / 4, t = cuda_on_cpu::lane() % 4;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = g + i / 2 * 8, column = 2 * t + i % 2;
    double total = sums[i];
    for (int k = 0; k < depth; ++k) total += static_cast<double>(a_at(slots, row, k)) * b_at(slots, k, column);
    sums[i] = static_cast<float>(total);
  }
}

template <typename Widen>
void mma_16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* operation, Widen widen) {
  const auto half_of = [=](uint32_t pair, int k) { return widen(static_cast<uint16_t>(k % 2 ? pair >> 16 : pair)); };
  mma(
      sums, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, operation, 16,
      [=](const char* slots, unsigned row, int k) {
        const Operands of = cuda_on_cpu::of_lane<Operands>(slots, row % 8 * 4 + k % 8 / 2);
        return half_of(of.a[row / 8 + k / 8 * 2], k);
      },
      [=](const char* slots, int k, unsigned column) {
        const Operands of = cuda_on_cpu::of_lane<Operands>(slots, column * 4 + k % 8 / 2);
        return half_of(of.b[k / 8], k);
      });
}

}  // namespace on_cpu

inline void load_matrices(uint32_t (&fragment)[4], const void* row) { on_cpu::load_matrices(fragment, row, false); }
inline void load_matrices_transposed(uint32_t (&fragment)[4], const void* row) {
  on_cpu::load_matrices(fragment, row, true);
}

inline void mma_bfloat(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  on_cpu::mma_16(sums, a, b, "mma_bfloat", bfloat_to_float);
}
inline void mma_half(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  on_cpu::mma_16(sums, a, b, "mma_half", half_to_float);
}

inline void barrier_of_blocks(unsigned long long* counter, unsigned blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned long long target = (atomicAdd(counter, 1ull) / blocks + 1) * blocks;
    cuda_on_cpu::wait_for(counter, target);
  }
  __syncthreads();
}

template <typename T>
T* keep_here(T* pointer) {
  return pointer;
}
inline int keep_here(int value) { return value; }

}  // namespace fedkernels::cuda

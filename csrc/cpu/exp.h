// The exponential of a register, to about 1 unit in the last place for x <= 0.
#pragma once

#include "cpu/gemm.h"

namespace fedkernels::FEDKERNELS_ISA {

template <class T>
struct ExpOf;

template <>
struct ExpOf<float> {
  typedef uint32_t Bits __attribute__((vector_size(LANES * 8)));
  static constexpr int MANTISSA = 23, DEGREE = 7;
  static constexpr float ROUND = 0x1.8p23f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f, SMALLEST = -87;
};

template <>
struct ExpOf<double> {
  typedef uint64_t Bits __attribute__((vector_size(LANES * 8)));
  static constexpr int MANTISSA = 52, DEGREE = 13;
  static constexpr double ROUND = 0x1.8p52, LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;
  static constexpr double SMALLEST = -708;
};

// 0 below -87 (float) and -708 (double); NaN for NaN.
template <class T>
static inline typename Wide<T>::Type exp_of(typename Wide<T>::Type x) {
  using E = ExpOf<T>;
  // exp(x) = 2^n exp(r) with |r| <= ln(2) / 2. Adding ROUND leaves the integer n in the last bits of the sum.
  const auto shifted = x * (T)1.4426950408889634 + E::ROUND;
  const auto n = shifted - E::ROUND;
  const auto r = (x - n * E::LN2_HIGH) - n * E::LN2_LOW;
  constexpr struct Taylor {
    T of[E::DEGREE + 1];
    constexpr Taylor() : of{1} {
      for (int k = 1; k <= E::DEGREE; ++k) of[k] = of[k - 1] / k;
    }
  } taylor;
  auto power = Wide<T>::splat(taylor.of[E::DEGREE]);
#pragma GCC unroll 16
  for (int k = E::DEGREE - 1; k >= 0; --k) power = power * r + taylor.of[k];
  const auto result = (typename Wide<T>::Type)((typename E::Bits)power + ((typename E::Bits)shifted << E::MANTISSA));
  const auto kept = x < E::SMALLEST ? typename Wide<T>::Type{} : result;
  return x == x ? kept : x;
}

}  // namespace fedkernels::FEDKERNELS_ISA

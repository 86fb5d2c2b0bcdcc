// One kernel source is compiled once for each instruction set, into a namespace of that name; the best that the
// processor has is chosen at run time.
//
// Kernel sources include no header of the C++ library that defines templates or inline functions: the linker keeps
// one copy of such a function, which may be the one compiled for AVX-512, and older processors would run it.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace fedkernels {

enum class Isa { baseline, avx2, avx512 };

// The best instruction set that is compiled in and that this processor has, or the one that the environment variable
// FEDKERNELS_CPU names, where both hold for it.
Isa isa();

}  // namespace fedkernels

// The build defines these as `baseline` for instruction sets that it leaves out (FEDKERNELS_CPU_INSTRUCTION_SETS).
#ifndef FEDKERNELS_AVX2
#define FEDKERNELS_AVX2 avx2
#endif
#ifndef FEDKERNELS_AVX512
#define FEDKERNELS_AVX512 avx512
#endif

#if defined(__x86_64__)
#define FEDKERNELS_DECLARE(name, result, ...) \
  namespace fedkernels::baseline {            \
  result name(__VA_ARGS__);                   \
  }                                           \
  namespace fedkernels::avx2 {                \
  result name(__VA_ARGS__);                   \
  }                                           \
  namespace fedkernels::avx512 {              \
  result name(__VA_ARGS__);                   \
  }
#define FEDKERNELS_BEST(name)                                                         \
  (fedkernels::isa() == fedkernels::Isa::avx512 ? fedkernels::FEDKERNELS_AVX512::name \
   : fedkernels::isa() == fedkernels::Isa::avx2 ? fedkernels::FEDKERNELS_AVX2::name   \
                                                : fedkernels::baseline::name)
#else
#define FEDKERNELS_DECLARE(name, result, ...) \
  namespace fedkernels::baseline {            \
  result name(__VA_ARGS__);                   \
  }
#define FEDKERNELS_BEST(name) fedkernels::baseline::name
#endif

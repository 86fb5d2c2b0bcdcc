// Memory of a kernel, handed out piece by piece.
#pragma once

#include "cpu/isa.h"

namespace fedkernels::FEDKERNELS_ISA {

// A bump allocator over one piece of memory, or over none to learn how much is needed.
struct Memory {
  char* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    used = (used + 63) / 64 * 64;
    T* const start = base ? (T*)(base + used) : nullptr;
    used += count * (int64_t)sizeof(T);
    return start;
  }
};

}  // namespace fedkernels::FEDKERNELS_ISA

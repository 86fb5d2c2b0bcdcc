// Memory of a kernel, handed out piece by piece.
#pragma once

#include "cpu/isa.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace fedkernels::FEDKERNELS_ISA {

// A bump allocator over one piece of memory, or over none to learn how much is needed. AddressSanitizer knows
// only the whole piece, so 64 bytes behind every part are marked as forbidden for it.
struct Memory {
  char* base;
  int64_t used = 0;
  bool again = false;

  template <class T>
  T* take(int64_t count) {
    used = (used + 63) / 64 * 64;
    T* const start = base ? (T*)(base + used) : nullptr;
    used += count * (int64_t)sizeof(T);
#ifdef __SANITIZE_ADDRESS__
    if (base && !again) ASAN_POISON_MEMORY_REGION(base + used, 64);
    used += 64;
#endif
    return start;
  }

  // Hands out once more what lies behind `start`. The two uses have other pieces: nothing is watched there.
  void share(int64_t start) {
#ifdef __SANITIZE_ADDRESS__
    if (base) ASAN_UNPOISON_MEMORY_REGION(base + start, used - start);
#endif
    used = start;
    again = true;
  }
};

}  // namespace fedkernels::FEDKERNELS_ISA

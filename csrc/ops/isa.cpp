// The instruction set whose kernels are used, see cpu/isa.h.
#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>

namespace fedkernels {

[[maybe_unused]] static bool is_compiled(const char* name) { return std::strstr(FEDKERNELS_ISAS, name) != nullptr; }

static Isa best_isa() {
  Isa best = Isa::baseline;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    if (is_compiled("avx2")) best = Isa::avx2;
    if (is_compiled("avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
      best = Isa::avx512;
    }
  }
  const char* wanted = std::getenv("FEDKERNELS_CPU");
  if (wanted && std::strcmp(wanted, "baseline") == 0) best = Isa::baseline;
  if (wanted && std::strcmp(wanted, "avx2") == 0 && best == Isa::avx512 && is_compiled("avx2")) best = Isa::avx2;
#endif
  return best;
}

Isa isa() {
  static const Isa chosen = best_isa();
  return chosen;
}

}  // namespace fedkernels

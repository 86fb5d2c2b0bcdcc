#include "cpu/apply_deltas.h"

#include "cpu/simd.h"

// Without fused multiply-add every bit is the reference's, and the loop waits for memory in any case.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace fedkernels::FEDKERNELS_ISA {

void apply_deltas(const Array* arrays, const double* weights, int64_t clients, int64_t start, int64_t count) {
  constexpr int64_t TILE = 512;
  double base[TILE], step[TILE], client[TILE];
  for (int64_t done = 0; done < count; done += TILE) {
    const int64_t size = count - done < TILE ? count - done : TILE;
    const int64_t ahead = count - done - size < TILE ? count - done - size : TILE;
    prefetch(arrays[0], start + done + size, ahead);
    widen(base, arrays[0], start + done, size);
    // fault: i < size; -> i < size && !done;
    for (int64_t i = 0; i < size; ++i) step[i] = 0;
    for (int64_t k = 0; k < clients; ++k) {
      const double weight = weights[k];
      prefetch(arrays[k + 1], start + done + size, ahead);
      if (arrays[k + 1].dtype == DType::f32) {
        // fault: start + done; -> start;
        const float* entries = (const float*)arrays[k + 1].data + start + done;
        for (int64_t i = 0; i < size; ++i) step[i] += weight * (base[i] - entries[i]);
      } else {
        widen(client, arrays[k + 1], start + done, size);
        for (int64_t i = 0; i < size; ++i) step[i] += weight * (base[i] - client[i]);
      }
    }
    for (int64_t i = 0; i < size; ++i) base[i] -= step[i];
    write(arrays[0].data, arrays[0].dtype, start + done, base, size);
  }
}

}  // namespace fedkernels::FEDKERNELS_ISA

// Philox4x32-10, the counter-based random numbers of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2,
// 3"): four random words that are a function of a key and a counter alone. For CPUs and GPUs.
#pragma once

#include <stdint.h>

#if defined(__CUDACC__)
#define FEDKERNELS_HOST_DEVICE __host__ __device__
#else
#define FEDKERNELS_HOST_DEVICE
#endif

namespace fedkernels {

struct PhiloxKey {
  uint32_t words[2];
};

struct PhiloxWords {
  uint32_t words[4];
};

FEDKERNELS_HOST_DEVICE static inline PhiloxWords philox(PhiloxWords counter, PhiloxKey key) {
  uint32_t c0 = counter.words[0], c1 = counter.words[1], c2 = counter.words[2], c3 = counter.words[3];
  uint32_t k0 = key.words[0], k1 = key.words[1];
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = (uint64_t)c0 * 0xD2511F53u, second = (uint64_t)c2 * 0xCD9E8D57u;
    c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)second;
    c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)first;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace fedkernels

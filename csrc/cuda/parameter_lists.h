// The global and the K clients' versions of T tensors as the kernels see them, for apply_deltas and delta_gram.
#pragma once

#include <string.h>

#include "cpu/dtype.h"
#include "cuda/launch.h"
#include "cuda/words.h"

namespace fedkernels::cuda {

// The lists on the host: arrays[t * (clients + 1)] is the global version of tensor t, the clients' follow it.
struct HostLists {
  const Array* arrays;
  const int64_t* sizes;  // entries of each tensor
  int64_t tensors, clients;
  const double* weights;  // [clients], or nullptr
};

constexpr int MIXED = -1;  // versions of a tensor differ in their dtype

// Chunks of one tensor: chunk c of all belongs to the tensor t with first_chunk[t] <= c < first_chunk[t + 1].
struct DeviceLists {
  const Array* arrays;
  const int64_t* sizes;
  const int64_t* dtypes;       // [tensors], of all versions of a tensor, or MIXED
  const int64_t* first_chunk;  // [tensors + 1]
  const double* weights;       // [clients]
  int64_t tensors, clients, chunks, chunk;  // chunk: entries
  bool wide;                                // is a tensor float64?

  struct Piece {
    const Array* arrays;
    int64_t start;
    int count, dtype;
  };

  __device__ Piece piece(int64_t index) const {
    int64_t low = 0, high = tensors;  // the last tensor with first_chunk <= index; empty tensors have no chunk
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (first_chunk[middle] <= index) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int64_t start = (index - first_chunk[low]) * chunk, left = sizes[low] - start;
    return {arrays + low * (clients + 1), start, static_cast<int>(left < chunk ? left : chunk),
            static_cast<int>(dtypes[low])};
  }
};

// The words travel as arguments of kernels: nothing on the host has to outlive the call, and a graph replays it.
constexpr int WORDS_AT_A_TIME = 496;  // 4 KB of arguments are allowed everywhere
struct Words {
  int64_t values[WORDS_AT_A_TIME];
};

namespace {

__global__ void write_words(int64_t* to, Words words, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) to[i] = words.values[i];
}

}  // namespace

// Copies the lists to `memory` on the device, words_of_lists() words.
inline const char* send_lists(const HostLists& host, int64_t chunk, int64_t* memory, Stream stream,
                              DeviceLists* device) {
  static_assert(sizeof(Array) == 2 * sizeof(int64_t) && sizeof(double) == sizeof(int64_t));
  const int64_t arrays = 2 * host.tensors * (host.clients + 1);
  int64_t* const sizes = memory + arrays;
  int64_t* const dtypes = sizes + host.tensors;
  int64_t* const first_chunk = dtypes + host.tensors;
  int64_t* const weights = first_chunk + host.tensors + 1;
  *device = {reinterpret_cast<const Array*>(memory),
             sizes,
             dtypes,
             first_chunk,
             reinterpret_cast<const double*>(weights),
             host.tensors,
             host.clients,
             0,
             chunk,
             false};

  Words words;
  int filled = 0;
  int64_t* to = memory;
  const char* error = nullptr;
  const auto flush = [&] {
    if (filled && !error) error = launch({2, 256}, stream, write_words, to, words, filled);
    to += filled;
    filled = 0;
  };
  const auto send = [&](const void* word) {
    memcpy(&words.values[filled++], word, 8);
    if (filled == WORDS_AT_A_TIME) flush();
  };
  for (int64_t i = 0; i < host.tensors * (host.clients + 1); ++i) {
    const int64_t dtype = static_cast<int64_t>(host.arrays[i].dtype);
    device->wide |= host.arrays[i].dtype == DType::f64;
    send(&host.arrays[i].data);
    send(&dtype);
  }
  for (int64_t t = 0; t < host.tensors; ++t) send(host.sizes + t);
  for (int64_t t = 0; t < host.tensors; ++t) {
    const Array* const versions = host.arrays + t * (host.clients + 1);
    int64_t dtype = static_cast<int64_t>(versions[0].dtype);
    for (int64_t k = 1; k <= host.clients; ++k) {
      if (versions[k].dtype != versions[0].dtype) dtype = MIXED;
    }
    send(&dtype);
  }
  for (int64_t t = 0; t <= host.tensors; ++t) {
    send(&device->chunks);
    if (t < host.tensors) device->chunks += (host.sizes[t] + chunk - 1) / chunk;
  }
  if (host.weights) {
    for (int64_t k = 0; k < host.clients; ++k) send(host.weights + k);
  }
  flush();
  return error;
}

}  // namespace fedkernels::cuda

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

constexpr int MIXED = 15;    // in the place of a dtype: versions of a tensor differ in theirs
constexpr int ALIGNED = 16;  // a flag beside the dtype: all versions of a tensor start at a multiple of 16 bytes

// Chunks of one tensor, a multiple of 16 entries long: chunk c of all belongs to the tensor t with
// first_chunk[t] <= c < first_chunk[t + 1].
struct DeviceLists {
  const Array* arrays;
  const int64_t* sizes;
  const int64_t* dtypes;       // [tensors], of all versions of a tensor, or MIXED; with ALIGNED
  const int64_t* first_chunk;  // [tensors + 1]
  const double* weights;       // [clients]
  int64_t tensors, clients, chunks, chunk;  // chunk: entries
  bool wide;                                // is a tensor float64?

  struct Piece {
    const Array* arrays;
    int64_t start;
    int count, dtype;
    bool aligned;  // do all versions of the piece start at a multiple of 16 bytes?
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
    const int dtype = static_cast<int>(dtypes[low]);
    return {arrays + low * (clients + 1), start, static_cast<int>(left < chunk ? left : chunk), dtype % ALIGNED,
            dtype >= ALIGNED};
  }
};

// The words travel as arguments of kernels: nothing on the host has to outlive the call, and a graph replays it.
template <int COUNT>
struct Words {
  int64_t values[COUNT];
};
constexpr int WORDS_IN_LARGE_ARGUMENTS = 4088, WORDS_IN_SMALL_ARGUMENTS = 504;  // with the other two: 32,720 and 4,048

namespace {

template <int COUNT>
__global__ void write_words(int64_t* to, Words<COUNT> words, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) to[i] = words.values[i];
}

// Collects words and sends COUNT at a time to the device.
template <int COUNT>
class WordSender {
 public:
  WordSender(int64_t* to, Stream stream) : to_(to), stream_(stream) {}

  void send(const void* word) {
    memcpy(&words_.values[filled_++], word, 8);
    if (filled_ == COUNT) flush();
  }
  // Sends what has been collected. Returns nullptr, or the first error of all launches.
  const char* flush() {
    if (filled_ && !error_) {
      const unsigned blocks = static_cast<unsigned>((filled_ + 255) / 256);
      error_ = launch({blocks, 256}, stream_, write_words<COUNT>, to_, words_, filled_);
    }
    to_ += filled_;
    filled_ = 0;
    return error_;
  }

 private:
  int64_t* to_;
  Stream stream_;
  Words<COUNT> words_;
  int filled_ = 0;
  const char* error_ = nullptr;
};

template <int COUNT>
const char* send_lists_by(const HostLists& host, int64_t chunk, int64_t* memory, Stream stream, DeviceLists* device) {
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

  WordSender<COUNT> sender(memory, stream);
  for (int64_t i = 0; i < host.tensors * (host.clients + 1); ++i) {
    const int64_t dtype = static_cast<int64_t>(host.arrays[i].dtype);
    device->wide |= host.arrays[i].dtype == DType::f64;
    sender.send(&host.arrays[i].data);
    sender.send(&dtype);
  }
  for (int64_t t = 0; t < host.tensors; ++t) sender.send(host.sizes + t);
  for (int64_t t = 0; t < host.tensors; ++t) {
    const Array* const versions = host.arrays + t * (host.clients + 1);
    bool mixed = false, aligned = true;
    for (int64_t k = 0; k <= host.clients; ++k) {
      mixed |= versions[k].dtype != versions[0].dtype;
      aligned &= reinterpret_cast<uintptr_t>(versions[k].data) % 16 == 0;
    }
    const int64_t dtype = (mixed ? MIXED : static_cast<int64_t>(versions[0].dtype)) + (aligned ? ALIGNED : 0);
    sender.send(&dtype);
  }
  for (int64_t t = 0; t <= host.tensors; ++t) {
    sender.send(&device->chunks);
    if (t < host.tensors) device->chunks += (host.sizes[t] + chunk - 1) / chunk;
  }
  if (host.weights) {
    for (int64_t k = 0; k < host.clients; ++k) sender.send(host.weights + k);
  }
  return sender.flush();
}

}  // namespace

// Copies the lists to `memory` on the device, words_of_lists() words. `chunk`: entries, a multiple of 16.
inline const char* send_lists(const HostLists& host, int64_t chunk, int64_t* memory, Stream stream,
                              DeviceLists* device) {
  return has_large_arguments()
             ? send_lists_by<WORDS_IN_LARGE_ARGUMENTS>(host, chunk, memory, stream, device)
             : send_lists_by<WORDS_IN_SMALL_ARGUMENTS>(host, chunk, memory, stream, device);
}

}  // namespace fedkernels::cuda

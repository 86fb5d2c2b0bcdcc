// torch's own thread pool as the kernels' threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "cpu/tasks.h"

namespace fedkernels {

// Inside another parallel region torch runs all of it on the calling thread.
inline void run_tasks(int64_t count, int64_t workers, void (*task)(int64_t, int64_t, void*), void* context) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, std::min(workers, count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t index = next++; index < count; index = next++) task(index, worker, context);
    }
  });
}

// body(index, worker) for every index below count: threads take one after another, so that one that the machine holds
// up does not hold up the others.
template <class Body>
void for_each_task(int64_t count, int64_t workers, const Body& body) {
  run_tasks(
      count, workers,
      [](int64_t index, int64_t worker, void* context) { (*static_cast<const Body*>(context))(index, worker); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

inline Threads torch_threads() { return {run_tasks, static_cast<int64_t>(torch::stable::get_num_threads())}; }

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// Memory for a kernel, aligned to 64 bytes and not touched yet.
inline std::unique_ptr<char, Free> kernel_memory(int64_t bytes) {
  char* const memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64));
  if (!memory) throw std::bad_alloc();
  return std::unique_ptr<char, Free>(memory);
}

// kernel(threads, memory) with as much memory as it tells that it wants, by torch's threads.
template <class Kernel>
void run_kernel(const Kernel& kernel) {
  const Threads threads = torch_threads();
  kernel(threads, kernel_memory(kernel(threads, nullptr)).get());
}

}  // namespace fedkernels

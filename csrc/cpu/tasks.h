// Work in tasks that threads take from one counter. A kernel gets `run` from ops/, which has the threads.
#pragma once

#include <stdint.h>

namespace fedkernels {

// Calls task(index, worker, context) for every index below count; worker, below count and workers, tells threads apart,
// for their own memory.
using RunTasks = void (*)(int64_t count, int64_t workers, void (*task)(int64_t index, int64_t worker, void* context),
                          void* context);

struct Threads {
  RunTasks run;
  int64_t workers;
};

}  // namespace fedkernels

namespace fedkernels::FEDKERNELS_ISA {

// body(index, worker) for every index below count; returns when all are done.
template <class Body>
static inline void for_each(const Threads& threads, int64_t count, const Body& body) {
  threads.run(
      count, threads.workers,
      [](int64_t index, int64_t worker, void* context) { (*(const Body*)context)(index, worker); }, (void*)&body);
}

}  // namespace fedkernels::FEDKERNELS_ISA

// Runs the threads of a grid as fibres on one thread of the CPU. A fibre gives way at barriers and exchanges only, so
// what a thread reads before a barrier that it should have waited for, another has not written yet. A warp runs until
// none of its lanes can go on, then the next warp does. Blocks run one after another, in the reversed order a few in
// turn; those of a cooperative launch run together, each as far as it can go.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"
#include "cuda/ptx.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else  // the same calls, which do nothing
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
inline void __asan_unpoison_memory_region(const void*, size_t) {}
inline void __asan_set_error_report_callback(void (*)(const char*)) {}
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

Thread* current = nullptr;
const void* expected_stream = nullptr;

namespace {

// ---- fibres ----

constexpr size_t STACK = 256 << 10;  // only pages that are used take memory

#if defined(__x86_64__)
extern "C" void cuda_on_cpu_switch(void** from, void* to);
asm(R"(
.text
.p2align 4
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
using Context = void*;

void change(Context* from, Context* to) { cuda_on_cpu_switch(from, *to); }

void prepare(Context* context, char* stack, void (*entry)()) {
  // Stacks of many threads that began at the same distance would share a few lines of the cache.
  char* const end = stack + STACK - reinterpret_cast<uintptr_t>(stack) / STACK % 128 * 320;
  void** top = reinterpret_cast<void**>(end) - 2;  // after `ret` the stack is as after a call
  *top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  *context = top;
}
#else
using Context = ucontext_t;

void change(Context* from, Context* to) { swapcontext(from, to); }

void prepare(Context* context, char* stack, void (*entry)()) {
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = STACK;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
}
#endif

constexpr size_t BLOCKS_IN_TURN = 3;

enum class State { ready, at_barrier, at_exchange, polling, ended };

struct Copy {
  void* to;
  const void* from;
  int bytes, valid, group;
};

struct Block;

struct Fibre : Thread {
  Context context;
  char* stack;
  void* fake_stack = nullptr;
  State state = State::ready;
  Block* of;
  unsigned warp, lane;
  const unsigned long long* counter;  // polling
  unsigned long long target;
  std::vector<Copy> copies;
  int group = 0;  // of copies, the one that is open
};

// Lanes that exchange values; two sets of slots, for a fast lane may be at the next exchange before a slow one has read.
struct Exchange {
  unsigned come = 0, phase = 0;
  const char* operation = nullptr;
  alignas(64) char slots[2][32][64];

  Exchange() {}  // the slots stay as they are
};

struct Settings {
  int poison = 0x7fff, reversed = 0, multiprocessors = 4;
  size_t shared_limit = 227 << 10;
  unsigned grid_limit = 65535;  // of its second and third side
} settings;

const std::function<void()>* body;
std::string error;
bool failed;
Context scheduler;
void* scheduler_fake_stack;
const void* scheduler_stack;
size_t scheduler_stack_size;

void on_report(const char* report) {
  if (error.empty()) error = report;
}

inline Fibre* self() { return static_cast<Fibre*>(current); }

void switch_to_scheduler(bool last = false) {
  Fibre* fibre = self();
  __sanitizer_start_switch_fiber(last ? nullptr : &fibre->fake_stack, scheduler_stack, scheduler_stack_size);
  change(&fibre->context, &scheduler);
  __sanitizer_finish_switch_fiber(fibre->fake_stack, &scheduler_stack, &scheduler_stack_size);
}

void switch_to(Fibre* fibre) {
  current = fibre;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibre->stack, STACK);
  change(&scheduler, &fibre->context);
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
  current = nullptr;
}

void entry();

// Stacks are kept for the next block.
std::vector<char*> free_stacks;

char* take_stack() {
  if (free_stacks.empty()) {
    void* memory = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return static_cast<char*>(memory);
  }
  char* stack = free_stacks.back();
  free_stacks.pop_back();
  __asan_unpoison_memory_region(stack, STACK);
  return stack;
}

// ---- memory of a block ----

void* poisoned(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes)) abort();
  const uint16_t pattern = settings.poison;
  for (size_t i = 0; i < bytes; ++i) static_cast<char*>(memory)[i] = pattern >> i % 2 * 8;
  return memory;
}

unsigned threads_of(const Launch& launch) { return launch.block.x * launch.block.y * launch.block.z; }

struct Block {
  std::vector<Fibre> fibres;
  std::vector<std::map<unsigned, Exchange>> exchanges;  // of each warp, by their mask
  unsigned at_barrier = 0, ended = 0;
  int votes = 0, outcome = 0;
  void* dynamic;
  std::vector<std::pair<const SharedVariable*, void*>> variables;
  size_t variable_bytes = 0;

  Block(const Launch& launch, uint3 index)
      : fibres(threads_of(launch)),
        exchanges(fibres.size() / 32),
        dynamic(launch.shared ? poisoned(launch.shared, 128) : nullptr) {
    const dim3& size = launch.block;
    for (unsigned i = 0; i < fibres.size(); ++i) {
      Fibre& fibre = fibres[i];
      fibre.thread = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      fibre.block = index;
      fibre.block_size = size;
      fibre.grid_size = launch.grid;
      fibre.stack = take_stack();
      fibre.of = this;
      fibre.warp = i / 32;
      fibre.lane = i % 32;
      prepare(&fibre.context, fibre.stack, entry);
    }
  }

  ~Block() {
    for (Fibre& fibre : fibres) free_stacks.push_back(fibre.stack);
    for (auto& variable : variables) free(variable.second);
    free(dynamic);
  }
};

void entry() {
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
  (*body)();
  self()->state = State::ended;
  ++self()->of->ended;
  switch_to_scheduler(true);
  abort();
}

using Blocks = std::vector<std::unique_ptr<Block>>;

void carry_out(const Copy& copy) {
  memcpy(copy.to, copy.from, copy.valid);
  memset(static_cast<char*>(copy.to) + copy.valid, 0, copy.bytes - copy.valid);
}

// ---- the scheduler ----

void describe_standstill(const Blocks& blocks) {
  unsigned count[5] = {}, total = 0;
  std::string operation;
  for (const auto& block : blocks) {
    for (const Fibre& fibre : block->fibres) {
      ++count[static_cast<int>(fibre.state)];
      ++total;
    }
    for (const auto& warp : block->exchanges) {
      for (const auto& [mask, exchange] : warp) {
        if (exchange.come && operation.empty()) operation = std::string(" (") + exchange.operation + ")";
      }
    }
  }
  char text[256];
  snprintf(text, sizeof(text),
           "a barrier that not all threads reach: of %u threads %u wait at __syncthreads, %u in their warp%s, %u for other "
           "blocks, and %u have ended",
           total, count[1], count[2], operation.c_str(), count[3], count[4]);
  error = text;
  failed = true;
}

// Each warp of the block, as far as it can go without others. -> whether any of them moved
bool run_warps(Block* block) {
  bool moved = false;
  const size_t threads = block->fibres.size();
  for (size_t first = 0; first < threads; first += 32) {
    for (bool moved_now = true; moved_now && !failed;) {
      moved_now = false;
      for (size_t i = first; i < first + 32 && !failed; ++i) {
        Fibre* const fibre = &block->fibres[settings.reversed ? threads - 1 - i : i];
        if (fibre->state == State::polling && *fibre->counter >= fibre->target) fibre->state = State::ready;
        if (fibre->state != State::ready) continue;
        moved = moved_now = true;
        switch_to(fibre);
      }
    }
  }
  return moved;
}

// Between two barriers all accesses of a warp come before all of the next one, and after them where the order is
// reversed: whatever two warps do to one place in one such interval, unordered, one of the two orders shows. The same
// holds for the lanes of a warp between two exchanges, and for blocks that wait for each other. Blocks that do not wait
// for each other take turns at every barrier where `in_turn` is set, so that one meets what another leaves in memory.
void run_blocks(const Blocks& blocks, bool in_turn) {
  const auto goes_on = [](const auto& block) { return block->ended < block->fibres.size(); };
  while (std::any_of(blocks.begin(), blocks.end(), goes_on)) {
    bool moved = false;
    for (const auto& block : blocks) {
      bool of_block = run_warps(block.get());
      moved |= of_block;
      while (of_block && !in_turn) of_block = run_warps(block.get());
      if (failed) return;
    }
    if (!moved) return describe_standstill(blocks);
  }
}

}  // namespace

// ---- what the headers call ----

void fail(const char* format, ...) {
  char text[512];
  const Fibre* fibre = self();
  const int start = snprintf(text, sizeof(text), "block %u, thread %u: ", fibre->block.x, fibre->thread.x);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + start, sizeof(text) - start, format, arguments);
  va_end(arguments);
  error = text;
  failed = true;
  switch_to_scheduler(true);
  abort();
}

int barrier(bool vote) {
  Fibre* fibre = self();
  Block* block = fibre->of;
  block->votes += vote;
  if (++block->at_barrier == block->fibres.size()) {
    block->outcome = block->votes;
    block->votes = 0;
    block->at_barrier = 0;
    for (Fibre& other : block->fibres) {
      if (other.state == State::at_barrier) other.state = State::ready;
    }
  } else {
    fibre->state = State::at_barrier;
    switch_to_scheduler();
  }
  return block->outcome;
}

const char* exchange(unsigned mask, const char* operation, const void* value, size_t bytes) {
  Fibre* fibre = self();
  if (!(mask >> fibre->lane & 1)) fail("%s: the lane is not in its own mask %#x", operation, mask);
  Exchange* exchange = &fibre->of->exchanges[fibre->warp][mask];
  if (exchange->come && strcmp(exchange->operation, operation)) {
    fail("lanes of one warp are at different operations: %s and %s", exchange->operation, operation);
  }
  exchange->operation = operation;
  char(*slots)[64] = exchange->slots[exchange->phase];
  memcpy(slots[fibre->lane], value, bytes);
  exchange->come |= 1u << fibre->lane;
  if (exchange->come == mask) {
    exchange->come = 0;
    exchange->phase ^= 1;
    Fibre* of_lane = fibre - fibre->lane;
    for (unsigned lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1 && of_lane[lane].state == State::at_exchange) of_lane[lane].state = State::ready;
    }
  } else {
    fibre->state = State::at_exchange;
    switch_to_scheduler();
  }
  return slots[0];
}

void wait_for(const unsigned long long* counter, unsigned long long target) {
  Fibre* fibre = self();
  while (*counter < target) {
    fibre->counter = counter;
    fibre->target = target;
    fibre->state = State::polling;
    switch_to_scheduler();
  }
}

// A card may copy at any time between the call and the wait: it is done at the wait, and in the reversed order at once.
void copy_later(void* to, const void* from, int bytes, int valid) {
  if (valid < 0 || valid > bytes) fail("copy_async: %d of %d bytes", valid, bytes);
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) {
    fail("copy_async: an address is not a multiple of %d", bytes);
  }
  const Copy copy = {to, from, bytes, valid, self()->group};
  if (settings.reversed) return carry_out(copy);
  self()->copies.push_back(copy);
}

void close_copies() { ++self()->group; }

void wait_for_copies(int pending) {
  const int open = self()->group - pending;
  for (const Copy& copy : self()->copies) {
    if (copy.group < open) carry_out(copy);
  }
  std::erase_if(self()->copies, [=](const Copy& copy) { return copy.group < open; });
}

char* dynamic_shared() {
  Block* block = self()->of;
  if (!block->dynamic) fail("dynamic_shared: the launch gives no shared memory");
  return static_cast<char*>(block->dynamic);
}

void* SharedVariable::here() const {
  Block* block = self()->of;
  for (const auto& variable : block->variables) {
    if (variable.first == this) return variable.second;
  }
  block->variable_bytes += bytes;
  if (block->variable_bytes > 48 << 10) fail("SHARED: %zu bytes, a block has 49152", block->variable_bytes);
  void* memory = poisoned(bytes, std::max<size_t>(alignment, 16));
  block->variables.push_back({this, memory});
  return memory;
}

bool is_reversed() { return settings.reversed; }
int multiprocessors() { return settings.multiprocessors; }
size_t shared_limit() { return settings.shared_limit; }

const char* run(const Launch& launch, const std::function<void()>& of_thread) {
  const unsigned threads = threads_of(launch);
  const size_t blocks = static_cast<size_t>(launch.grid.x) * launch.grid.y * launch.grid.z;
  failed = false;
  error.clear();
  if (threads == 0 || threads > 1024 || threads % 32) error = "a block must have a multiple of 32 threads, up to 1024";
  if (blocks == 0 || launch.grid.y > settings.grid_limit || launch.grid.z > settings.grid_limit) {
    error = "a grid with no blocks, or too many";
  }
  if (launch.shared > settings.shared_limit) error = "more dynamic shared memory than a block may have";
  if (!error.empty()) return error.c_str();

  __asan_set_error_report_callback(on_report);
  body = &of_thread;
  Blocks together;
  const size_t at_a_time = settings.reversed ? BLOCKS_IN_TURN : 1;
  for (size_t i = 0; i < blocks && !failed; ++i) {
    const size_t index = settings.reversed ? blocks - 1 - i : i;
    const unsigned x = index % launch.grid.x, y = index / launch.grid.x % launch.grid.y;
    const unsigned z = index / launch.grid.x / launch.grid.y;
    together.push_back(std::make_unique<Block>(launch, uint3{x, y, z}));
    if (together.size() < (launch.cooperative ? blocks : at_a_time) && i + 1 < blocks) continue;
    run_blocks(together, !launch.cooperative);
    together.clear();
  }
  return error.empty() ? nullptr : error.c_str();
}

// Shared memory starts as `poison` in each two bytes; `reversed` runs blocks, warps and lanes from the last to the
// first, blocks in turn, and copies at once.
extern "C" void cuda_on_cpu_settings(int poison, int reversed, int multiprocessors, size_t shared_limit,
                                     unsigned grid_limit) {
  settings = {poison, reversed, multiprocessors, shared_limit, grid_limit};
}

}  // namespace cuda_on_cpu

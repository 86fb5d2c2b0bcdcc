// The twin of csrc/cuda/launch.h.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <tuple>

#include "cuda/stream.h"

namespace cuda_on_cpu {

struct Launch {
  dim3 grid, block;
  size_t shared;
  bool cooperative;
};

// Runs body() as every thread of the grid. -> nullptr, or what went wrong.
const char* run(const Launch& launch, const std::function<void()>& body);

// That of the caller, which all launches must be on.
extern const void* expected_stream;

char* dynamic_shared();
int multiprocessors();
size_t shared_limit();

// A __shared__ variable: each block has its own.
struct SharedVariable {
  size_t bytes, alignment;
  void* here() const;
};

}  // namespace cuda_on_cpu

namespace fedkernels::cuda {

struct Shape {
  dim3 grid, block;
  size_t shared = 0;
  bool cooperative = false;
};

template <typename... Parameters, typename... Arguments>
const char* launch(const Shape& shape, Stream stream, void (*kernel)(Parameters...), Arguments... arguments) {
  if (sizeof(std::tuple<Parameters...>) > 4096) return "too many bytes of arguments";
  if (stream != cuda_on_cpu::expected_stream) return "a launch on another stream than the caller's";
  const std::tuple<Parameters...> values(static_cast<Parameters>(arguments)...);
  return cuda_on_cpu::run({shape.grid, shape.block, shape.shared, shape.cooperative},
                          [&] { std::apply(kernel, values); });
}

inline const char* fill_zero(void* data, size_t bytes, Stream stream) {
  if (stream != cuda_on_cpu::expected_stream) return "zeros written on another stream than the caller's";
  memset(data, 0, bytes);
  return nullptr;
}

inline int multiprocessors() { return cuda_on_cpu::multiprocessors(); }
inline size_t shared_limit() { return cuda_on_cpu::shared_limit(); }

template <typename... Parameters>
int blocks_at_a_time(const Shape& shape, void (*)(Parameters...)) {
  return shape.shared > 100 << 10 ? 1 : 2;
}

template <typename... Parameters>
const char* why_not_on(int device, void (*)(Parameters...)) {
  return device == 0 ? nullptr : "no such device";
}

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(cuda_on_cpu::dynamic_shared());
}

template <typename T>
struct Same {
  using type = T;
};

}  // namespace fedkernels::cuda

#define SHARED(name, ...)                                                                                      \
  static const cuda_on_cpu::SharedVariable name##_variable{sizeof(__VA_ARGS__), alignof(__VA_ARGS__)};         \
  typename ::fedkernels::cuda::Same<__VA_ARGS__>::type& name =                                                 \
      *static_cast<typename ::fedkernels::cuda::Same<__VA_ARGS__>::type*>(name##_variable.here())

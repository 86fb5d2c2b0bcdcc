// What the operators share: tensors of the stable ABI as the kernels' arrays, and pieces of lists of tensors.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/dtype.h"

namespace fedkernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return DType::f64;
    case ScalarType::Float:
      return DType::f32;
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::f16;
    default:
      STD_TORCH_CHECK(false, name, " must be float16, bfloat16, float32 or float64");
  }
}

// Of what is computed in float64 (`wide`) or in float32.
inline ScalarType result_dtype(bool wide) { return wide ? ScalarType::Double : ScalarType::Float; }

inline void* data_or_null(const Tensor& tensor) { return tensor.numel() ? tensor.data_ptr() : nullptr; }

// Python's checks come first and are the ones that a user meets; these keep a direct call from reading elsewhere.
inline Array array_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), name, " must be contiguous on the CPU");
  return {tensor.data_ptr(), dtype_of(tensor, name)};
}

// The global and the K clients' version of each tensor side by side: arrays[t * (K + 1)] is the global one.
struct ParameterLists {
  std::vector<Array> arrays;
  std::vector<int64_t> sizes;
  int64_t clients;

  // read(tensor, name): the tensor's Array, once the tensor is checked.
  template <class Read>
  ParameterLists(const std::vector<Tensor>& global_params, const std::vector<Tensor>& client_params, const Read& read) {
    const int64_t tensors = global_params.size();
    STD_TORCH_CHECK(tensors > 0 && !client_params.empty() && client_params.size() % tensors == 0,
                    "client_params must hold K >= 1 versions of the T >= 1 tensors in global_params");
    clients = client_params.size() / tensors;
    for (int64_t t = 0; t < tensors; ++t) {
      arrays.push_back(read(global_params[t], "global_params"));
      sizes.push_back(global_params[t].numel());
      for (int64_t k = 0; k < clients; ++k) {
        const Tensor& client = client_params[k * tensors + t];
        STD_TORCH_CHECK(client.numel() == sizes[t], "client_params must have the sizes of global_params");
        arrays.push_back(read(client, "client_params"));
      }
    }
  }

  const Array* of(int64_t tensor) const { return arrays.data() + tensor * (clients + 1); }
};

struct Piece {
  int64_t tensor, start, count;
};

// The lists in pieces of at most `length` entries: what the threads share. It does not depend on how many they are.
inline std::vector<Piece> pieces_of(const ParameterLists& lists, int64_t length) {
  std::vector<Piece> pieces;
  for (int64_t t = 0; t < static_cast<int64_t>(lists.sizes.size()); ++t) {
    for (int64_t start = 0; start < lists.sizes[t]; start += length) {
      pieces.push_back({t, start, std::min(length, lists.sizes[t] - start)});
    }
  }
  return pieces;
}

}  // namespace fedkernels

// A CUDA stream by its name alone, for headers that callers without CUDA's headers include.
#pragma once

struct CUstream_st;

namespace fedkernels::cuda {

using Stream = CUstream_st*;  // cudaStream_t

}  // namespace fedkernels::cuda

// Not every GPU that torch uses can run these kernels: it may be older than all that they were compiled for, or its
// driver older than the CUDA that is linked into the module.
#include "cuda/usable.h"

#include "cuda/launch.h"

namespace fedkernels::cuda {

namespace {

__global__ void nothing() {}  // compiled for the architectures that all kernels are compiled for

}  // namespace

}  // namespace fedkernels::cuda

extern "C" const char* cuda_unusable(int device) {
  return fedkernels::cuda::why_not_on(device, fedkernels::cuda::nothing);
}

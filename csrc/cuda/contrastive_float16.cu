// The contrastive passes in float16, on the tensor cores.
#include "cuda/contrastive.h"

#include "cuda/contrastive_launch.h"

extern "C" bool cuda_contrastive_float16_fits(int64_t width) {
  using namespace fedkernels::cuda;
  return fits(HalfTiles<Float16>(), width);
}

extern "C" int64_t cuda_contrastive_float16_memory(const fedkernels::cuda::ContrastivePass* pass) {
  using namespace fedkernels::cuda;
  return memory_of(HalfTiles<Float16>(), *pass);
}

extern "C" const char* cuda_contrastive_float16(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                           fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  return run(HalfTiles<Float16>(), *pass, memory, stream);
}

// The contrastive passes in float32 rounded to tf32, on the tensor cores.
#include "cuda/contrastive.h"

#include "cuda/contrastive_launch.h"

extern "C" bool cuda_contrastive_tf32_fits(int64_t width) {
  using namespace fedkernels::cuda;
  return fits(TF32Tiles(), width);
}

extern "C" int64_t cuda_contrastive_tf32_memory(const fedkernels::cuda::ContrastivePass* pass) {
  using namespace fedkernels::cuda;
  return memory_of(TF32Tiles(), *pass);
}

extern "C" const char* cuda_contrastive_tf32(const fedkernels::cuda::ContrastivePass* pass, void* memory,
                                           fedkernels::cuda::Stream stream) {
  using namespace fedkernels::cuda;
  return run(TF32Tiles(), *pass, memory, stream);
}

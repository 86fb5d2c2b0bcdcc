// Declares the operators to torch. Their implementations are registered in the other files of this folder.
#include "ops/schemas.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(fedkernels, m) {
  for (const char* schema : fedkernels::SCHEMAS) m.def(schema);
}

// Can a GPU run the kernels of csrc/cuda?
#pragma once

// nullptr, or why the device of this number cannot. It prepares the device as any kernel would.
extern "C" const char* cuda_unusable(int device);

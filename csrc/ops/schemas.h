// The schemas of the operators, from the file that fedkernels/internal/native.py reads too.
#pragma once

namespace fedkernels {

inline constexpr const char* SCHEMAS[] = {
#include "../../fedkernels/_schemas.inc"
};

}  // namespace fedkernels

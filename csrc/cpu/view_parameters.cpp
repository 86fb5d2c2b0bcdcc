// Without fused multiply-add every bit is the reference's.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "cpu/two_views.h"

namespace fedkernels::FEDKERNELS_ISA {

void view_parameters(PhiloxKey key, int64_t sample, uint32_t view, const ViewOptions& options, int64_t height,
                     int64_t width, ViewParameters* drawn) {
  *drawn = draw_view(key, sample, view, options, height, width);
}

}  // namespace fedkernels::FEDKERNELS_ISA

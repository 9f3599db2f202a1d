// Every instantiation of the attention kernel, by what chooses it.
//
// Invariant: null means that this build has no such kernel, and attend() says so; nothing is computed by another kernel
// in silence. Each file attend_*.cu holds those of a few head sizes, so that they build side by side.
#pragma once

#include "kernels/cuda/attend_params.h"

namespace kvq::cuda {

using AttendKernel = void (*)(AttendParams);

struct Variant {
  Dtype dtype;
  bool wide;   // kWideTiles row tiles in place of one
  bool plain;  // no soft cap, no ALiBi
};

AttendKernel attend_d64(Variant variant);
AttendKernel attend_d80(Variant variant);
AttendKernel attend_d96(Variant variant);
AttendKernel attend_d128(Variant variant);
AttendKernel attend_d192(Variant variant);
AttendKernel attend_d256(Variant variant);

inline AttendKernel find_kernel(std::uint32_t d, Variant variant) {
  switch (d) {
    case 64:
      return attend_d64(variant);
    case 80:
      return attend_d80(variant);
    case 96:
      return attend_d96(variant);
    case 128:
      return attend_d128(variant);
    case 192:
      return attend_d192(variant);
    case 256:
      return attend_d256(variant);
    default:
      return nullptr;
  }
}

}  // namespace kvq::cuda

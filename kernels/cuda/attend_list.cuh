// The kernels of one head size.
//
// Invariant: the two common head sizes have kernels without soft cap and ALiBi of their own for few rows (kPlainToo);
// elsewhere those two are run-time flags.
#pragma once

#include "kernels/cuda/attend_kernel.cuh"
#include "kernels/cuda/attend_variants.h"

namespace kvq::cuda {

template <std::uint32_t kD, Dtype kType, bool kPlainToo>
AttendKernel kernel_of(const Variant& variant) {
  if (variant.wide) return attend_kernel<kD, kType, kWideTiles, false>;
  if constexpr (kPlainToo) {
    if (variant.plain) return attend_kernel<kD, kType, kNarrowTiles, true>;
  }
  return attend_kernel<kD, kType, kNarrowTiles, false>;
}

template <std::uint32_t kD, bool kPlainToo>
AttendKernel kernel_of(const Variant& variant) {
  return variant.dtype == Dtype::fp16 ? kernel_of<kD, Dtype::fp16, kPlainToo>(variant)
                                      : kernel_of<kD, Dtype::bf16, kPlainToo>(variant);
}

}  // namespace kvq::cuda

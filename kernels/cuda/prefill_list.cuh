// The kernels for many query rows of one head size.
#pragma once

#include "kernels/cuda/prefill_kernel.cuh"

namespace kvq::cuda {

template <std::uint32_t kD, Dtype kType>
PrefillKernel prefill_of(const PrefillVariant& variant) {
  if (variant.many) return variant.plain ? prefill_kernel<kD, 2, kType, true> : prefill_kernel<kD, 2, kType, false>;
  return variant.plain ? prefill_kernel<kD, 1, kType, true> : prefill_kernel<kD, 1, kType, false>;
}

template <std::uint32_t kD>
PrefillKernel prefill_of(const PrefillVariant& variant) {
  return variant.dtype == Dtype::fp16 ? prefill_of<kD, Dtype::fp16>(variant) : prefill_of<kD, Dtype::bf16>(variant);
}

}  // namespace kvq::cuda

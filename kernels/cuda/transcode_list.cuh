// The kernels of one target, with constants and without.
//
// Invariant: a list of head sizes that a file builds; any other, and any mix, takes the kernel without constants.
#pragma once

#include "kernels/cuda/transcode_kernel.cuh"
#include "kernels/cuda/transcode_kernels.h"
#include "kernels/cuda/transcode_rewrites.cuh"

namespace kvq::cuda {

template <Target kTarget, std::uint32_t... kHeadDims>
TranscodeKernel kernel_of(const Rewritten& all) {
  TranscodeKernel found = rewrite_pages<RewriteMixed<kTarget>>;
  const auto offer = [&](std::uint32_t head_dim, TranscodeKernel fp16, TranscodeKernel bf16) {
    if (all.head_dim == head_dim) found = all.dtype == Dtype::fp16 ? fp16 : bf16;
  };
  (offer(kHeadDims, rewrite_pages<RewriteAlike<kTarget, kHeadDims, Dtype::fp16>>,
         rewrite_pages<RewriteAlike<kTarget, kHeadDims, Dtype::bf16>>),
   ...);
  return found;
}

}  // namespace kvq::cuda

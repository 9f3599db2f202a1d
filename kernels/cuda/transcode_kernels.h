// Every instantiation of the transcode kernel, by what chooses it.
//
// Invariant: all kernels of one target give the same bytes; those with constants are for speed. The files
// transcode_*.cu hold a few each, so that they build side by side.
#pragma once

#include "kernels/cuda/transcode_batch.h"

namespace kvq::cuda {

using TranscodeKernel = void (*)(BatchWork);

// What all layers that are rewritten have in common.
struct Rewritten {
  Format from = Format::none, to = Format::none;  // none: blocks are copied or summed up alone
  std::uint32_t head_dim = 0;                     // 0: they differ, in that or in dtype
  Dtype dtype = Dtype::fp16;
};

inline Rewritten rewritten(const LayerWork* layers, std::uint32_t count) {
  Rewritten all;
  for (const LayerWork* layer = layers; layer != layers + count; ++layer) {
    if (layer->from == layer->to) continue;
    if (all.to == Format::none) {
      all = {layer->from, layer->to, layer->head_dim, layer->dtype};
    } else if (all.head_dim != layer->head_dim || all.dtype != layer->dtype) {
      all.head_dim = 0;
    }
  }
  return all;
}

TranscodeKernel copy_kernel();
TranscodeKernel dense_kernel();
TranscodeKernel int4_kernel(const Rewritten& all);
TranscodeKernel kept_kernel(const Rewritten& all);
TranscodeKernel wide_kernel(const Rewritten& all);

inline TranscodeKernel find_kernel(const Rewritten& all) {
  switch (all.to) {
    case Format::none:
      return copy_kernel();
    case Format::dense:
      return dense_kernel();
    case Format::int4:
      return int4_kernel(all);
    case Format::k8v4:
      return wide_kernel(all);
    default:
      return kept_kernel(all);
  }
}

}  // namespace kvq::cuda

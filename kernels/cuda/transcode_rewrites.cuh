// What transcode kernels do with a block: one for each kind of rewrite, and some with their sizes as constants.
//
// Invariant: the same functions underneath, so a kernel with constants gives the same bytes as the general one. Any
// kernel takes blocks that are copied or only summed up.
#pragma once

#include "kernels/cuda/dequantize_block.cuh"
#include "kernels/cuda/quantize_block.cuh"

namespace kvq::cuda {

enum class Target { int4, kept, wide };  // int4; int4_kN; k8v4

// Whether that was all there is to do.
__device__ __forceinline__ bool passed_on(const BlockWork& block, const Columns& columns, const std::byte* source,
                                          Sums& sums) {
  if (block.to_bytes != 0 && block.from_format != block.to_format) return false;
  block.to_bytes == 0 ? columns.add_source(block, source, sums) : columns.copy(block, source, sums);
  return true;
}

// Equal formats, and sums alone.
struct RewriteNothing {
  __device__ static void block(const BlockWork& block, const Lane&, const Columns& columns, const std::byte* source,
                               std::byte*, Sums& sums) {
    passed_on(block, columns, source, sums);
  }
};

// Quantized -> dense, any head size; layers may differ.
struct RewriteToDense {
  __device__ static void block(const BlockWork& block, const Lane& lane, const Columns& columns,
                               const std::byte* source, std::byte* scratch, Sums& sums) {
    if (passed_on(block, columns, source, sums)) return;
    columns.add_source(block, source, sums);
    sync_workers(1, kTranscodeThreads);  // the block before this is out of the scratch
    block.dtype == Dtype::fp16
        ? dequantize_block<Dtype::fp16>(source, block.from_format, block.head_dim, lane, scratch)
        : dequantize_block<Dtype::bf16>(source, block.from_format, block.head_dim, lane, scratch);
    columns.pass<true>(scratch, block.to_bytes, block.to_chunk, block.to, sums.destination);
  }
};

template <Target kTarget, Dtype kType>
__device__ __forceinline__ void quantize(const BlockWork& block, std::uint32_t d, const Lane& lane,
                                         const Columns& columns, const std::byte* source, std::byte* scratch,
                                         Sums& sums) {
  const Format format = kTarget == Target::int4   ? Format::int4
                        : kTarget == Target::wide ? Format::k8v4
                                                  : block.to_format;
  columns.pass<false, true>(source, static_cast<std::uint32_t>(block_bytes(Format::dense, d)), block.from_chunk,
                            nullptr, sums.source);
  quantize_block<kType, kTarget == Target::wide>(block, source, format, d, lane,
                                                 *reinterpret_cast<KeyScratch*>(scratch), sums);
}

// Dense -> one kind of quantized format; head size and dtype as they come.
template <Target kTarget>
struct RewriteMixed {
  __device__ static void block(const BlockWork& block, const Lane& lane, const Columns& columns,
                               const std::byte* source, std::byte* scratch, Sums& sums) {
    if (passed_on(block, columns, source, sums)) return;
    block.dtype == Dtype::fp16
        ? quantize<kTarget, Dtype::fp16>(block, block.head_dim, lane, columns, source, scratch, sums)
        : quantize<kTarget, Dtype::bf16>(block, block.head_dim, lane, columns, source, scratch, sums);
  }
};

// The same where all blocks are alike.
template <Target kTarget, std::uint32_t kHeadDim, Dtype kType>
struct RewriteAlike {
  __device__ static void block(const BlockWork& block, const Lane& lane, const Columns& columns,
                               const std::byte* source, std::byte* scratch, Sums& sums) {
    if (passed_on(block, columns, source, sums)) return;
    quantize<kTarget, kType>(block, kHeadDim, lane, columns, source, scratch, sums);
  }
};

}  // namespace kvq::cuda

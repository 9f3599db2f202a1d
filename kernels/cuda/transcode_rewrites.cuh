// What transcode kernels do with a block: one for any mix of layers, and one per common case with its sizes as
// constants.
//
// Invariant: the same functions underneath, so a common case gives the same bytes as the general kernel.
#pragma once

#include "kernels/cuda/dequantize_block.cuh"
#include "kernels/cuda/quantize_block.cuh"

namespace kvq::cuda {

// Any pair, any head size; layers may differ.
struct RewriteAny {
  static constexpr int kCtas = 2;
  static constexpr bool kWarpsApart = false;
  static constexpr std::uint32_t kDenseBytes = 0;

  __device__ static void block(const BlockWork& block, const Lane& lane, const std::byte* source, std::byte* scratch,
                               Sums& sums) {
    if (block.to_bytes == 0) return;
    if (block.from_format == block.to_format) return write_block(block, source, sums);
    block.dtype == Dtype::fp16 ? rewrite<Dtype::fp16>(block, lane, source, scratch, sums)
                               : rewrite<Dtype::bf16>(block, lane, source, scratch, sums);
  }

 private:
  template <Dtype kType>
  __device__ static void rewrite(const BlockWork& block, const Lane& lane, const std::byte* source, std::byte* scratch,
                                 Sums& sums) {
    if (block.to_format == Format::dense) {
      dequantize_block<kType>(source, block.from_format, block.head_dim, lane, scratch);
      write_block(block, scratch, sums);
    } else if (block.to_format == Format::k8v4) {
      quantize_block<kType, true>(block, source, Format::k8v4, block.head_dim, lane, nullptr, sums);
    } else {
      auto* kept = kept_channels(block.to_format) != 0 ? reinterpret_cast<KeptChannels*>(scratch) : nullptr;
      quantize_block<kType, false>(block, source, block.to_format, block.head_dim, lane, kept, sums);
    }
  }
};

// dense -> int4 with one head size and dtype; layers that keep dense are copied.
template <std::uint32_t kHeadDim, Dtype kType>
struct RewriteInt4 {
  static constexpr int kCtas = 3;
  static constexpr bool kWarpsApart = true;  // warps share nothing but the source
  static constexpr std::uint32_t kDenseBytes = block_bytes(Format::dense, kHeadDim);

  __device__ static void block(const BlockWork& block, const Lane& lane, const std::byte* source, std::byte*,
                               Sums& sums) {
    if (block.to_format == Format::dense) return write_block(block, source, sums);
    quantize_block<kType, false>(block, source, Format::int4, kHeadDim, lane, nullptr, sums);
  }
};

}  // namespace kvq::cuda

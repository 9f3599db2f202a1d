// The memory that a worker makes and other processes open: one implementation for each way of passing it on.
//
// Invariant: memory is zero before a descriptor of it leaves, and whoever has the descriptor opens what this process
// sees. Slab i is at one address from its placing to its release, i * slab_bytes from that of slab 0. Blocks and slabs
// end before the object does. One thread, the context current.
#pragma once

#include <cuda.h>

#include <optional>

#include "daemon/gpu/backend.h"
#include "daemon/gpu/cuda_context.h"

namespace kvq::gpu {

class SlabMemory {
 public:
  virtual ~SlabMemory() = default;

  virtual Exporter exporter() const = 0;
  virtual std::uint64_t granularity() const = 0;  // of slabs and blocks

  // --- the arena; reserve() once, before the others. As Backend says, whose calls these are. ---
  virtual Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) = 0;
  virtual Result<NewMemory> make_slab() = 0;
  virtual Result<void> place_slab(SlabId slab, std::uint64_t serial) = 0;
  virtual Result<void> adopt_slab(SlabId slab, const Descriptor& file) = 0;
  virtual void release_slab(SlabId slab) = 0;
  virtual CUdeviceptr slab(std::uint64_t number) const = 0;  // 0: none has this place

  // --- memory beside the arena: a mirror's ---
  class Block {
   public:
    virtual ~Block() = default;
    virtual CUdeviceptr base() const = 0;
  };
  struct NewBlock {
    std::unique_ptr<Block> block;
    Descriptor exported;
  };
  virtual Result<NewBlock> make_block(std::uint64_t bytes) = 0;
  virtual Result<std::unique_ptr<Block>> adopt_block(std::uint64_t bytes, const Descriptor& file) = 0;
};

// `exporter` as asked for; none: vmm where the GPU can, else legacy.
Result<std::unique_ptr<SlabMemory>> choose_slab_memory(const CudaContext& context, std::optional<Exporter> exporter);
Result<std::unique_ptr<SlabMemory>> make_vmm_slabs(const CudaContext& context);
std::unique_ptr<SlabMemory> make_legacy_slabs(const CudaContext& context);

// Random, never 0.
Result<std::uint64_t> new_serial();

// What every kind answers, whatever it keeps of its slabs.
inline constexpr Error kNoSuchSpare{Errc::invalid_argument, 0, "no spare slab has this serial"};
inline constexpr Error kNoSuchPlace{Errc::invalid_argument, 0, "a slab beyond the arena"};
inline constexpr Error kPlaceTaken{Errc::invalid_argument, 0, "this slab is in its place already"};

}  // namespace kvq::gpu

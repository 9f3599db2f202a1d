// Memory that crosses processes by legacy handles: the arena is one allocation, each block another.
//
// Invariant: a place of the arena is free, offered as a spare, or a slab's. It is zeroed between being free and being
// offered, when nobody may use it, so what an earlier slab held there never shows. All of it goes when this process
// does, so nothing is ever adopted.
#include <algorithm>
#include <vector>

#include "daemon/gpu/slab_memory.h"
#include "kernels/cuda/legacy_memory.h"

namespace kvq::gpu {
namespace {

constexpr Error kEnded{Errc::stale_id, 0, "memory of a legacy handle ends with the worker that made it"};

class LegacyBlock final : public SlabMemory::Block {
 public:
  explicit LegacyBlock(cuda::LegacyMemory memory) : memory_(std::move(memory)) {}
  CUdeviceptr base() const override { return memory_.base(); }

 private:
  const cuda::LegacyMemory memory_;
};

class LegacySlabs final : public SlabMemory {
 public:
  explicit LegacySlabs(const CudaContext& context) : context_(context) {}

  Exporter exporter() const override { return Exporter::legacy; }
  std::uint64_t granularity() const override { return cuda::kLegacyGranularity; }

  // Fewer places when the GPU has no room for all: then one fewer than fit, since mirrors need room, too. What is
  // missing shows when make_slab() has no more.
  Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) override {
    slab_bytes_ = slab_bytes;
    while (slabs > 0) {
      Result<cuda::LegacyMemory> arena = cuda::LegacyMemory::create(slab_bytes * slabs);
      if (arena) {
        arena_ = std::move(*arena);
        places_.resize(slabs);
        return {};
      }
      if (arena.error().code != Errc::no_memory) return arena.error();
      const Result<std::uint64_t> free = context_.free_bytes();
      if (!free) return free.error();
      const std::uint64_t fit = *free / slab_bytes;
      slabs = static_cast<std::uint32_t>(std::min<std::uint64_t>(slabs - 1, fit > 0 ? fit - 1 : 0));
    }
    return {};
  }

  // Waits for the GPU: zeroing a slab takes as long as the GPU lets it, which is well below a kvqd's patience.
  Result<NewMemory> make_slab() override {
    const auto place = std::find_if(places_.begin(), places_.end(), [](const Place& p) { return p.is_free(); });
    if (place == places_.end()) return Error{Errc::no_memory, CUDA_ERROR_OUT_OF_MEMORY, "the arena has no place left"};
    const auto number = static_cast<std::uint32_t>(place - places_.begin());
    const Result<std::uint64_t> serial = new_serial();
    if (!serial) return serial.error();
    const Result<int> fd = arena_.export_zeroed(number * slab_bytes_, slab_bytes_, arena_);
    if (!fd) return fd.error();
    place->spare = *serial;
    return NewMemory{Descriptor(*fd), *serial, number};
  }

  Result<void> place_slab(SlabId slab, std::uint64_t serial) override {
    const auto spare =
        std::find_if(places_.begin(), places_.end(), [serial](const Place& p) { return p.spare == serial; });
    if (serial == 0 || spare == places_.end()) return kNoSuchSpare;
    if (raw(slab) >= places_.size()) return kNoSuchPlace;
    if (places_[raw(slab)].taken) return kPlaceTaken;
    if (spare - places_.begin() != raw(slab)) {
      return Error{Errc::invalid_argument, 0, "this spare is memory of another slab's place"};
    }
    *spare = {.spare = 0, .taken = true};
    return {};
  }

  Result<void> adopt_slab(SlabId, const Descriptor&) override { return kEnded; }
  void release_slab(SlabId slab) override { places_[raw(slab)] = {}; }
  CUdeviceptr slab(std::uint64_t number) const override {
    return number < places_.size() && places_[number].taken ? arena_.base() + number * slab_bytes_ : 0;
  }

  Result<NewBlock> make_block(std::uint64_t bytes) override {
    Result<cuda::LegacyMemory> memory = cuda::LegacyMemory::create(bytes);
    if (!memory) return memory.error();
    const Result<int> fd = memory->export_zeroed(0, bytes, arena_);
    if (!fd) return fd.error();
    return NewBlock{std::make_unique<LegacyBlock>(std::move(*memory)), Descriptor(*fd)};
  }
  Result<std::unique_ptr<Block>> adopt_block(std::uint64_t, const Descriptor&) override { return kEnded; }

 private:
  struct Place {
    std::uint64_t spare = 0;  // serial of the spare that it is offered as
    bool taken = false;       // a slab is in it
    bool is_free() const { return spare == 0 && !taken; }
  };

  const CudaContext& context_;
  std::uint64_t slab_bytes_ = 0;
  cuda::LegacyMemory arena_;
  std::vector<Place> places_;
};

}  // namespace

std::unique_ptr<SlabMemory> make_legacy_slabs(const CudaContext& context) {
  return std::make_unique<LegacySlabs>(context);
}

}  // namespace kvq::gpu

// Physical memory that crosses processes as descriptors: slabs at their places in one range of addresses.
//
// Invariant: memory is held by descriptors outside and by mappings here; a spare is held without a mapping. So when
// this process dies, exactly what kvqd has no descriptor of goes back to the GPU.
#include <unordered_map>
#include <vector>

#include "daemon/gpu/slab_memory.h"

namespace kvq::gpu {
namespace {

class VmmBlock final : public SlabMemory::Block {
 public:
  static Result<std::unique_ptr<Block>> map(CUdevice device, std::uint64_t bytes, const cuda::Physical& memory) {
    auto out = std::make_unique<VmmBlock>();
    Result<cuda::AddressRange> range = cuda::AddressRange::reserve(device, bytes);
    if (!range) return range.error();
    out->range_ = std::move(*range);
    Result<cuda::Mapping> mapping = out->range_.map(0, bytes, memory, cuda::Access::read_write);
    if (!mapping) return mapping.error();
    out->mapping_ = std::move(*mapping);
    return std::unique_ptr<Block>(std::move(out));
  }
  CUdeviceptr base() const override { return mapping_.base(); }

 private:
  cuda::AddressRange range_;
  cuda::Mapping mapping_;
};

class VmmSlabs final : public SlabMemory {
 public:
  VmmSlabs(CUdevice device, std::uint64_t granularity) : device_(device), granularity_(granularity) {}

  Exporter exporter() const override { return Exporter::vmm; }
  std::uint64_t granularity() const override { return granularity_; }

  Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) override {
    Result<cuda::AddressRange> arena = cuda::AddressRange::reserve(device_, slab_bytes * slabs);
    if (!arena) return arena.error();
    arena_ = std::move(*arena);
    slab_bytes_ = slab_bytes;
    slabs_.resize(slabs);
    return {};
  }

  Result<NewMemory> make_slab() override {
    const Result<std::uint64_t> serial = new_serial();
    if (!serial) return serial.error();
    Result<cuda::Physical> memory = cuda::Physical::create(device_, slab_bytes_);
    if (!memory) return memory.error();
    const Result<int> fd = memory->export_fd();
    if (!fd) return fd.error();
    spares_.emplace(*serial, std::move(*memory));
    return NewMemory{Descriptor(*fd), *serial};
  }

  Result<void> place_slab(SlabId slab, std::uint64_t serial) override {
    const auto spare = spares_.find(serial);
    if (spare == spares_.end()) return kNoSuchSpare;
    if (const Result<void> mapped = map_slab(slab, spare->second); !mapped) return mapped;
    spares_.erase(spare);
    return {};
  }

  Result<void> adopt_slab(SlabId slab, const Descriptor& file) override {
    const Result<cuda::Physical> memory = cuda::Physical::import(file.get());
    if (!memory) return memory.error();
    return map_slab(slab, *memory);
  }

  void release_slab(SlabId slab) override { slabs_[raw(slab)] = cuda::Mapping(); }
  CUdeviceptr slab(std::uint64_t number) const override { return number < slabs_.size() ? slabs_[number].base() : 0; }

  Result<NewBlock> make_block(std::uint64_t bytes) override {
    const Result<cuda::Physical> memory = cuda::Physical::create(device_, bytes);
    if (!memory) return memory.error();
    const Result<int> fd = memory->export_fd();
    if (!fd) return fd.error();
    Descriptor exported(*fd);
    Result<std::unique_ptr<Block>> block = VmmBlock::map(device_, bytes, *memory);
    if (!block) return block.error();
    return NewBlock{std::move(*block), std::move(exported)};
  }

  Result<std::unique_ptr<Block>> adopt_block(std::uint64_t bytes, const Descriptor& file) override {
    const Result<cuda::Physical> memory = cuda::Physical::import(file.get());
    if (!memory) return memory.error();
    return VmmBlock::map(device_, bytes, *memory);
  }

 private:
  Result<void> map_slab(SlabId slab, const cuda::Physical& memory) {
    if (raw(slab) >= slabs_.size()) return kNoSuchPlace;
    if (slabs_[raw(slab)].base() != 0) return kPlaceTaken;
    Result<cuda::Mapping> mapping = arena_.map(raw(slab) * slab_bytes_, slab_bytes_, memory, cuda::Access::read_write);
    if (!mapping) return mapping.error();
    slabs_[raw(slab)] = std::move(*mapping);
    return {};
  }

  const CUdevice device_;
  const std::uint64_t granularity_;
  std::uint64_t slab_bytes_ = 0;
  cuda::AddressRange arena_;  // what is below goes first
  std::vector<cuda::Mapping> slabs_;
  std::unordered_map<std::uint64_t, cuda::Physical> spares_;  // by serial
};

}  // namespace

Result<std::unique_ptr<SlabMemory>> make_vmm_slabs(const CudaContext& context) {
  const CUdevice device = context.gpu().device;
  const Result<std::uint64_t> granularity = cuda::vmm_granularity(device);
  if (!granularity) return granularity.error();
  return std::unique_ptr<SlabMemory>(std::make_unique<VmmSlabs>(device, *granularity));
}

}  // namespace kvq::gpu

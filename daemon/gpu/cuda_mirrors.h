// The mirrors of the tenants' directories in device memory, and the stream that writes them.
//
// Invariant: the values of one entry reach its mirror in the order of write(), though a newer one may come in place of
// an older one; at most two batches are on the way, and what comes meanwhile joins the next. written() never runs
// ahead: a kernel that starts after it returned N sees every entry up to N.
#pragma once

#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "daemon/gpu/cuda_context.h"
#include "daemon/gpu/slab_memory.h"

namespace kvq::gpu {

class CudaMirrors {
 public:
  // Both outlive it.
  static Result<std::unique_ptr<CudaMirrors>> create(const CudaContext& context, SlabMemory& memory);
  ~CudaMirrors();
  CudaMirrors(const CudaMirrors&) = delete;
  CudaMirrors& operator=(const CudaMirrors&) = delete;

  Result<Descriptor> make(TenantId tenant, std::uint32_t entries);
  Result<void> adopt(TenantId tenant, std::uint32_t entries, const Descriptor& file);
  // invalid_argument: an entry that has no place in any mirror; then none is written.
  Result<void> write(std::span<const EntryWrite> writes);
  std::uint64_t written();
  // Whether the stream still works, from what write() and written() have seen.
  const Result<void>& health() const { return health_; }

 private:
  static constexpr std::uint32_t kBatches = 2, kBatchEntries = 4096;
  struct Mirror {
    std::uint32_t entries = 0;
    std::unique_ptr<SlabMemory::Block> block;
  };
  struct Waiting {
    std::uint64_t* entries;  // of a mirror
    std::uint32_t page;
    std::uint64_t sequence, entry;
  };
  struct Batch {
    std::uint64_t last = 0;
    CUevent passed = nullptr;
    bool running = false;
  };

  CudaMirrors(const CudaContext& context, SlabMemory& memory) : context_(context), memory_(memory) {}
  void place(TenantId tenant, std::uint32_t entries, std::unique_ptr<SlabMemory::Block> block);
  std::uint64_t bytes_of(std::uint32_t entries) const;
  void advance();
  Result<void> launch(Batch& batch);
  Result<void> write_to_one(std::span<const Waiting> writes);

  const CudaContext& context_;
  SlabMemory& memory_;
  CUstream stream_ = nullptr;
  Batch batches_[kBatches];
  std::uint32_t next_ = 0;  // the batch slot to launch next, hence the oldest one
  std::deque<Waiting> waiting_;
  std::unordered_map<std::uint32_t, Mirror> mirrors_;
  std::vector<Mirror> replaced_;  // until nothing is on the way to them
  std::uint64_t written_ = 0;
  Result<void> health_;
};

}  // namespace kvq::gpu

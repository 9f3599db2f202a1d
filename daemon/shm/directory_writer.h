// The directory's only writer: publishes entries and advances the tenant's epoch.
//
// Invariant: an entry is published with one release store. What retire() sends to limbo is tagged with epoch(), and
// advance_epoch() follows before any step ring is scanned: it stores the next epoch and then stands as the daemon's
// half of the fence pair (publish, fence, scan steps). The client's half is in kvq/segment.h, StepSlot (begin, fence,
// read).
#pragma once

#include "daemon/shm/memfd.h"
#include "kvq/directory.h"

namespace kvq {

struct DirectorySpec {
  TenantId tenant{};
  std::uint32_t capacity = 0;
  std::uint64_t arena_bytes = 0;
  std::uint64_t slab_bytes = 0;
  std::uint64_t prefix_buckets = 0;
};

class DirectoryWriter {
 public:
  static Result<DirectoryWriter> create(const DirectorySpec& spec);

  void publish(PageId page, const Entry& entry) {
    entries()[raw(page)].store(pack_entry(entry), std::memory_order_release);
  }
  Entry entry(PageId page) const { return unpack_entry(entries()[raw(page)].load(std::memory_order_relaxed)); }

  Epoch epoch() const { return Epoch{header().epoch.load(std::memory_order_relaxed)}; }
  void advance_epoch() {
    header().epoch.store(raw(epoch()) + 1, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }

  int read_only_descriptor() const { return memory_.read_only_descriptor(); }
  int descriptor() const { return memory_.descriptor(); }

 private:
  DirectoryHeader& header() const { return *reinterpret_cast<DirectoryHeader*>(memory_.data()); }
  DirectoryEntry* entries() const {
    return reinterpret_cast<DirectoryEntry*>(memory_.data() + sizeof(DirectoryHeader));
  }
  Memfd memory_;
};

}  // namespace kvq

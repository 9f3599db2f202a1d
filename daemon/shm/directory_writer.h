// The directory's only writer: publishes entries and advances the tenant's epoch.
//
// Invariant: an entry is published with one release store. What is retired is tagged with epoch(), and advance_epoch()
// follows before any step slot is scanned; both halves of its fence pair are in kvq/step_protocol.h.
#pragma once

#include "daemon/shm/memfd.h"
#include "kvq/directory.h"
#include "kvq/step_protocol.h"

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
  // What an earlier daemon made; the header must say what `spec` says. `file` is used up.
  static Result<DirectoryWriter> adopt(Descriptor& file, const DirectorySpec& spec);

  void publish(PageId page, const Entry& entry) {
    publish_entry<SharedMemory>(entries()[raw(page)], pack_entry(entry));
  }
  Entry entry(PageId page) const { return unpack_entry(entries()[raw(page)].load(std::memory_order_relaxed)); }

  Epoch epoch() const { return Epoch{header().epoch.load(std::memory_order_relaxed)}; }
  void advance_epoch() { kvq::advance_epoch<SharedMemory>(header().epoch); }

  const DirectoryEntry* first_entry() const { return entries(); }
  std::uint32_t capacity() const { return header().capacity; }

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

// What this process maps of one tenant: directory, prefix table and arena, once, however many clients and models use
// it.
//
// Invariant: a process has at most one TenantMemory per (daemon instance, tenant) and at most one mapping of each slab,
// at arena() + slab * slab_bytes. A slab is mapped when the first session is told to, and its place goes back to
// PROT_NONE when the last session that mapped it is told to unmap or ends. A child of fork() inherits none of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "client/mapped_file.h"
#include "kvq/directory.h"
#include "kvq/kvq.h"
#include "kvq/prefix_table.h"
#include "kvq/types.h"

namespace kvq::client {

class TenantMemory {
 public:
  struct Shape {
    std::uint64_t daemon_instance = 0;
    TenantId tenant{};
    std::uint64_t arena_bytes = 0;
    std::uint64_t slab_bytes = 0;
  };

  // The process's one object for this instance and tenant; made on first use, gone with its last user. Any thread.
  static std::shared_ptr<TenantMemory> of(const Shape& shape);

  explicit TenantMemory(const Shape& shape) : shape_(shape) {}
  ~TenantMemory();
  TenantMemory(const TenantMemory&) = delete;
  TenantMemory& operator=(const TenantMemory&) = delete;

  // Maps directory and prefix table unless a session of this process already did. Any thread.
  kvq_status map_tables(int directory_fd, int prefix_fd);

  // Maps a slab for `session`, or counts one more user of its mapping; twice is once. Another file in place of a mapped
  // slab replaces it: a daemon that died had announced the slab before it was on record, and no page was ever in it.
  // Any thread.
  kvq_status map_slab(SessionId session, SlabId slab, int fd, bool writable);
  void unmap_slab(SessionId session, SlabId slab);
  // The session ended: as if each of its slabs were unmapped.
  void forget_session(SessionId session);

  // After map_tables has succeeded; any thread, no lock.
  const DirectoryHeader& directory() const { return *reinterpret_cast<const DirectoryHeader*>(directory_->data()); }
  const DirectoryEntry* entries() const {
    return reinterpret_cast<const DirectoryEntry*>(directory_->data() + sizeof(DirectoryHeader));
  }
  const PrefixHeader& prefix_header() const { return *reinterpret_cast<const PrefixHeader*>(prefix_->data()); }
  const Bucket* buckets() const { return reinterpret_cast<const Bucket*>(prefix_->data() + sizeof(PrefixHeader)); }

  // Null until a slab was mapped. A reader got its page ids after that, so it sees the base.
  std::byte* arena() const { return arena_.load(std::memory_order_acquire); }
  const Shape& shape() const { return shape_; }
  std::size_t mapped_slabs() const;

 private:
  struct Slab {
    bool writable = false;
    std::uint64_t file = 0;            // inode of its memfd
    std::set<std::uint32_t> sessions;  // that mapped it: a set, not a count, so that nothing is counted twice
  };
  kvq_status reserve_arena();
  void remove_user(std::map<std::uint32_t, Slab>::iterator slab, SessionId session);

  const Shape shape_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Slab> slabs_;  // guarded by mutex_
  std::unique_ptr<MappedFile> directory_, prefix_;
  std::atomic<std::byte*> arena_{nullptr};
};

}  // namespace kvq::client

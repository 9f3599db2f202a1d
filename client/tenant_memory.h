// What this process maps of one tenant: directory, prefix table and arena, once, however many clients and models use
// it.
//
// Invariant: a process has at most one TenantMemory per (daemon instance, tenant, device) and at most one mapping of
// each slab, at arena() + slab * slab_bytes. A slab is mapped when the first session is told to, and its place is empty
// again when the last session that mapped it is told to unmap or ends; not while a step that was open then may still
// run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "client/device.h"
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
    std::string device_uuid;         // of the GPU that holds the pages; empty: the host does
    std::uint64_t mirror_bytes = 0;  // of the directory's copy on the GPU
  };

  // The process's one object for this instance and tenant; made on first use, gone with its last user. Any thread.
  static std::shared_ptr<TenantMemory> of(const Shape& shape);

  explicit TenantMemory(const Shape& shape);
  TenantMemory(const TenantMemory&) = delete;
  TenantMemory& operator=(const TenantMemory&) = delete;

  // Maps directory and prefix table unless a session of this process already did. Any thread.
  kvq_status map_tables(int directory_fd, int prefix_fd);

  // Finds the device that holds the pages, before the first slab comes. Any thread.
  kvq_status open_device();
  // Maps what kernels read in place of the directory, on a device that has it. Any thread.
  kvq_status map_mirror(int fd);

  // Whether what is mapped ends with kvqd. Any thread.
  bool ends_with_daemon() const;

  // Maps a slab for `session`, or counts one more user of its mapping; twice is once. Another serial in place of a
  // mapped slab replaces it: a daemon that died had announced the slab before it was on record, and no page was ever in
  // it. Any thread.
  kvq_status map_slab(SessionId session, SlabId slab, int fd, std::uint64_t serial, bool writable);
  void unmap_slab(SessionId session, SlabId slab);
  // The session ended: as if each of its slabs were unmapped.
  void forget_session(SessionId session);

  // Steps that may run behind the CPU's back: those of the watched sessions. A session is watched from its model's
  // first step on, until its segment goes.
  struct OpenStep {
    SessionId session{};
    std::uint32_t slot = 0;
    std::uint64_t serial = 0;
  };
  void watch(SessionId session, const Segment& segment);
  void unwatch(SessionId session);
  std::vector<OpenStep> open_steps() const;
  bool all_over(const std::vector<OpenStep>& steps) const;

  kvq_status make_model_side(Segment& segment, std::unique_ptr<ModelSide>& out);

  // After map_tables has succeeded; any thread, no lock.
  const DirectoryHeader& directory() const { return *reinterpret_cast<const DirectoryHeader*>(directory_->data()); }
  const DirectoryEntry* entries() const {
    return reinterpret_cast<const DirectoryEntry*>(directory_->data() + sizeof(DirectoryHeader));
  }
  const PrefixHeader& prefix_header() const { return *reinterpret_cast<const PrefixHeader*>(prefix_->data()); }
  const Bucket* buckets() const { return reinterpret_cast<const Bucket*>(prefix_->data() + sizeof(PrefixHeader)); }

  // Null until a slab was mapped. A reader got its page ids after that, so it sees the base.
  std::byte* arena() const { return device_->arena(); }
  // What kernels read: the directory's entries, or their copy on the device.
  const DirectoryEntry* kernel_entries() const {
    const DirectoryEntry* mirror = device_->mirror();
    return mirror != nullptr ? mirror : entries();
  }
  const Shape& shape() const { return shape_; }
  std::size_t mapped_slabs() const;

 private:
  struct Slab {
    bool writable = false;
    std::uint64_t serial = 0;          // as the daemon named it
    std::set<std::uint32_t> sessions;  // that mapped it: a set, not a count, so that nothing is counted twice
  };
  void remove_user(std::map<std::uint32_t, Slab>::iterator slab, SessionId session);

  const Shape shape_;
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Slab> slabs_;               // guarded by mutex_
  std::map<std::uint32_t, const StepSlot*> watched_;  // by session; guarded by mutex_
  std::unique_ptr<MappedFile> directory_, prefix_;
  const std::unique_ptr<DeviceSide> device_;
};

}  // namespace kvq::client

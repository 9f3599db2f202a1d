// The door to the memory that holds pages: one implementation per kind of device, one conformance suite for all.
//
// Invariant: only the loop thread calls these functions and none of them waits. Work that takes time is submitted and
// its completion polled; a job's source slot is left untouched, so a failed or abandoned job loses nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/shm/descriptor.h"
#include "kvq/directory.h"
#include "kvq/page_format.h"
#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq {

// Transcode one page: read `from` at `source`, write `to` at `destination` (bytes from the arena's base). The layouts
// outlive the job (the store owns the registry). Equal formats copy; without `to` the source is only read. The source
// is compared with `checksum` first, when there is one.
struct TranscodeJob {
  std::uint64_t id = 0;  // the store's; returned in the completion
  const ModelGeometry* geometry = nullptr;
  const PageLayout* from = nullptr;
  const PageLayout* to = nullptr;
  std::uint64_t source_bytes = 0;
  std::uint64_t destination_bytes = 0;
  std::optional<std::uint64_t> checksum;  // of the source
  std::optional<std::uint16_t> measured;  // a layer whose noise is wanted, dense before and quantized after
};

struct TranscodeDone {
  std::uint64_t id = 0;
  // code ok, or why the page must keep its old form (invalid_argument: non-finite or out-of-range values; lost_page:
  // the source is not what its checksum says; context_lost: whatever ran it is gone, which says nothing about the
  // page).
  Error error;
  std::uint64_t checksum = 0;  // of what was written; without `to`, of what was read
  std::optional<float> noise;  // logit_noise() (kernels/logit_noise.h) of the measured layer
};

// For operators.
struct DeviceHealth {
  bool degraded = false;
  std::string text;            // why; empty when all is well
  std::string uuid;            // of the GPU; empty on the host
  std::string exporter;        // how its memory is passed on, "vmm" or "legacy"; empty on the host
  std::uint64_t restarts = 0;  // of its worker
  // Of the device's memory; with the overhead of whatever runs the jobs, all that kvqd takes of it.
  std::uint64_t held_bytes = 0;      // slabs with a place, spare ones, mirrors
  std::uint64_t overhead_bytes = 0;  // beside these
};

class Device {
 public:
  virtual ~Device() = default;

  virtual std::string name() const = 0;           // "host"
  virtual std::uint64_t arena_bytes() const = 0;  // that slabs may take
  virtual std::uint64_t slab_bytes() const = 0;
  std::uint32_t slabs() const { return static_cast<std::uint32_t>(arena_bytes() / slab_bytes()); }
  // What its configuration asked for; arena_bytes() may be less, where there was no memory for it.
  virtual std::uint64_t asked_bytes() const { return arena_bytes(); }
  // The range of addresses in which slabs have their places, the same for every importer: how far the arena may grow.
  virtual std::uint64_t most_bytes() const { return arena_bytes(); }
  std::uint32_t places() const { return static_cast<std::uint32_t>(most_bytes() / slab_bytes()); }
  virtual bool can_resize() const { return false; }
  // Changes arena_bytes(), at most to most_bytes(). Slabs that are there stay.
  virtual void resize(std::uint64_t /*arena_bytes*/) {}

  // A new, zeroed slab at its place in the arena. Until destroy_slab the id is taken. no_memory: none now; ask again.
  virtual Result<void> create_slab(SlabId slab) = 0;
  // Whether memory outlives the device that made it; where not, adopt_slab and adopted mirrors always fail.
  virtual bool can_adopt() const { return true; }
  // The slab that an earlier daemon made, by its writable descriptor (used up) and serial, at its old place.
  virtual Result<void> adopt_slab(SlabId slab, Descriptor& file, std::uint64_t serial) = 0;
  // Names the memory, not the place: another slab at the same place has another serial. Never 0.
  virtual std::uint64_t slab_serial(SlabId slab) const = 0;
  // Gives the memory back. Every importer has dropped it (or died) before.
  virtual void destroy_slab(SlabId slab) = 0;
  // A descriptor that importers map; owned by the device, valid until destroy_slab. A read-only one cannot be mapped
  // writable.
  virtual int descriptor(SlabId slab, bool writable) const = 0;

  // --- the directory that kernels read ---
  // Kernels of a host device read the directory itself. Others read a mirror of its entries in the device's memory, one
  // per tenant, that the device makes by and by (an earlier daemon's is given by its descriptor, which is used up) and
  // brings to what `entries` say; they outlive the device.
  virtual bool has_mirrors() const { return false; }
  virtual void add_mirror(TenantId, const DirectoryEntry* entries, std::uint32_t capacity, Descriptor adopted);
  // For importers, owned by the device; -1 until the mirror is there.
  virtual int mirror_descriptor(TenantId) const { return -1; }
  // Writes one entry to the mirror, after all that was published before.
  virtual void publish(TenantId, PageId, std::uint64_t /*entry*/) {}
  // How many publications there were, and how many of these each kernel that starts now will see.
  virtual std::uint64_t publications() const { return 0; }
  virtual std::uint64_t published() const { return 0; }

  // --- jobs ---
  // Looks after whatever runs the jobs; at the start of each tick.
  virtual void advance(std::uint64_t /*now_ms*/) {}
  // Readable when poll() or published() may say something new; -1: `RunBlocking` says it.
  virtual int wake_descriptor() const { return -1; }
  virtual DeviceHealth health() const { return {}; }
  // How many jobs that only sum up it should have at a time: those that make room may wait behind them.
  virtual std::uint32_t checks_at_once() const { return 16; }
  // Whether somebody waits for memory; said at each tick before its jobs. A device that runs jobs at a pace, for the
  // sake of those who compute on it, then runs them at once, those that it has already too.
  virtual void set_urgent(bool /*urgent*/) {}
  // Queues jobs; the span is copied. Jobs run in any order and at the same time, on other threads: none touches a slot
  // that another one, not yet returned by poll, writes, except that one which only sums up may read it meanwhile.
  virtual void submit(std::span<const TranscodeJob> jobs) = 0;
  // Appends what has finished since the last call.
  virtual void poll(std::vector<TranscodeDone>& done) = 0;
  // Jobs submitted and not yet returned by poll.
  virtual std::size_t in_flight() const = 0;
};

// Runs `work` on some other thread; `done` later on the loop thread. The loop gives its worker pool, tests give inline
// ones.
using RunBlocking = std::function<void(std::function<void()> work, std::function<void()> done)>;

inline void Device::add_mirror(TenantId, const DirectoryEntry*, std::uint32_t, Descriptor) {}

// `most_bytes`: 0: it cannot grow.
std::unique_ptr<Device> make_host_device(std::uint64_t arena_bytes, std::uint64_t slab_bytes, RunBlocking run,
                                         std::uint64_t most_bytes = 0);

}  // namespace kvq

// The slabs of a device whose memory a worker makes: those with a place in the arena, and spares.
//
// Invariant: kvqd holds a descriptor of each, so a slab with a place outlives its worker, and the next one is asked to
// adopt it. Spares end with their worker; one that is memory of a certain place waits for that slab. A slab that a
// worker refused keeps its place and its content; only jobs cannot reach it until a worker has taken it.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "daemon/device/worker_link.h"
#include "kvq/types.h"

namespace kvq {

class SlabBook {
 public:
  struct Slab {
    Descriptor file, reader;  // reader: -1 where a descriptor cannot be narrowed
    std::uint64_t serial = 0;
    bool in_place = false;  // the worker has answered, or was asked to place a spare of its own
    std::string problem;
    Errc refusal = Errc::ok;  // likewise
  };

  // `places`: the most slabs that there may ever be. `files`: memory files, whose descriptors can be opened again for
  // reading only.
  void start(std::uint64_t slab_bytes, std::uint32_t slabs, std::uint32_t places, bool files);
  std::uint64_t slab_bytes() const { return slab_bytes_; }
  std::uint32_t places() const { return static_cast<std::uint32_t>(slabs_.size()); }
  std::uint32_t limit() const { return limit_; }
  void set_limit(std::uint32_t slabs) { limit_ = slabs; }
  std::uint32_t spares() const { return static_cast<std::uint32_t>(spares_.size()); }
  std::uint32_t missing() const;     // spares that a full arena would need
  std::uint32_t surplus() const;     // spares that it would not
  std::uint64_t held_bytes() const;  // with a place or spare

  // `index`: the slab that it can become, or gpu::kAnySlab.
  void add_spare(std::uint32_t index, std::uint64_t serial, Descriptor file);
  // no_memory: no spare fits, ask again.
  Result<void> create(WorkerLink& link, SlabId slab);
  Result<void> adopt(WorkerLink& link, SlabId slab, Descriptor& file, std::uint64_t serial);
  void destroy(WorkerLink* link, SlabId slab);
  const Slab& slab(SlabId slab) const;

  void adopted(SlabId slab);
  void refused(SlabId slab, Errc code, std::string why);
  // A new worker is asked to adopt all; one that ended took its spares along.
  void restart(WorkerLink& link);
  void stop() { spares_.clear(); }
  // Gives the newest spare, which fits any place, back to the GPU.
  void drop_spare(WorkerLink& link);
  std::string problem() const;  // of any slab; empty: none

 private:
  struct Spare {
    std::uint32_t index;
    std::uint64_t serial;
    Descriptor file;
  };
  std::uint32_t placed() const;
  Result<Descriptor> reader_of(const Descriptor& file) const;
  void send_adopt(WorkerLink& link, SlabId slab);

  std::uint64_t slab_bytes_ = 0;
  std::uint32_t limit_ = 0;
  bool files_ = false;
  std::vector<std::optional<Slab>> slabs_;
  std::deque<Spare> spares_;
};

}  // namespace kvq

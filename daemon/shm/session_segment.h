// The daemon's end of a session segment (kvq/segment.h).
//
// Invariant: nothing read here is trusted. The daemon keeps its own counts of what it took and gave (durable, beside
// its other records) and shows them to the client only once they are committed; it copies a command out before anyone
// looks at it, masks every index, clamps every epoch, and calls the session broken once a ring's indices cannot be what
// an honest client writes. A broken ring is never read again.
#pragma once

#include <array>
#include <optional>

#include "daemon/shm/memfd.h"
#include "kvq/segment.h"

namespace kvq {

// What the daemon has done with the two rings so far.
struct RingCounts {
  std::uint64_t commands_consumed;
  std::uint64_t magazine_produced;
};

class SessionSegment {
 public:
  struct Spec {
    SessionId session{};
    TenantId tenant{};
    std::uint32_t owner_pid = 0;
    std::array<std::uint8_t, 16> token{};
  };
  // `counts`: all zero; they outlive the segment. Whoever changes them by take_command() or push() has saved them
  // before, and calls show() once the change is committed.
  static Result<SessionSegment> create(const Spec& spec, RingCounts& counts);
  // What an earlier daemon made, with its counts. `file` is used up.
  static Result<SessionSegment> adopt(Descriptor& file, const Spec& spec, RingCounts& counts);

  // --- commands: client -> daemon ---
  // The next command, copied. Nothing: none there, or the ring is broken.
  std::optional<Command> next_command();
  void take_command() { ++counts_->commands_consumed; }  // it has been carried out or refused

  // --- magazine: daemon -> client ---
  // Pages that the client has not taken out yet.
  std::uint32_t magazine_count();
  bool push(const MagazineItem& item);  // false: full or broken

  // Writes a count, or both, where the client sees them. One at a time where it is hot: each is a cache line that the
  // client reads.
  void show_commands();
  void show_magazine();
  void show();

  bool broken() const { return broken_; }

  // --- steps ---
  // The smallest epoch of an open step, clamped to 1..current; one past current when no step is open. Follows
  // DirectoryWriter::advance_epoch.
  Epoch oldest_open(Epoch current) const;
  std::uint32_t open_steps() const;
  // True once step `serial` (0: none) has ended.
  bool step_ended(std::uint64_t serial) const;
  // Of a step that has ended: its client says that what it wrote may be missing.
  bool step_cut_short(std::uint64_t serial) const;

  // --- words ---
  DaemonWords& words() { return segment().daemon; }
  int descriptor() const { return memory_.descriptor(); }

 private:
  Segment& segment() const { return *reinterpret_cast<Segment*>(memory_.data()); }

  Memfd memory_;
  RingCounts* counts_ = nullptr;
  std::uint64_t magazine_consumed_seen_ = 0;
  bool broken_ = false;
};

}  // namespace kvq

// The daemon's end of a session segment (kvq/segment.h).
//
// Invariant: nothing read here is trusted. The daemon keeps its own copy of the index that it writes, copies a command
// out before anyone looks at it, masks every index, clamps every epoch, and calls the session broken once a ring's
// indices cannot be what an honest client writes. A broken ring is never read again.
#pragma once

#include <array>
#include <optional>

#include "daemon/shm/memfd.h"
#include "kvq/segment.h"

namespace kvq {

class SessionSegment {
 public:
  struct Spec {
    SessionId session{};
    TenantId tenant{};
    std::uint32_t owner_pid = 0;
    std::array<std::uint8_t, 16> token{};
  };
  static Result<SessionSegment> create(const Spec& spec);

  // --- commands: client -> daemon ---
  // The next command, copied. Nothing: none there, or the ring is broken.
  std::optional<Command> next_command();

  // --- magazine: daemon -> client ---
  // Pages that the client has not taken out yet.
  std::uint32_t magazine_count();
  bool push(const MagazineItem& item);  // false: full or broken

  bool broken() const { return broken_; }

  // --- steps ---
  // The smallest epoch of an open step, clamped to 1..current; one past current when no step is open. Follows
  // DirectoryWriter::advance_epoch.
  Epoch oldest_open(Epoch current) const;
  std::uint32_t open_steps() const;
  // True once step `serial` (0: none) has ended.
  bool step_ended(std::uint64_t serial) const;

  // --- words ---
  DaemonWords& words() { return segment().daemon; }
  int descriptor() const { return memory_.descriptor(); }

 private:
  Segment& segment() const { return *reinterpret_cast<Segment*>(memory_.data()); }

  Memfd memory_;
  std::uint64_t commands_consumed_ = 0;  // the daemon's own copy of what it writes
  std::uint64_t magazine_produced_ = 0;  // likewise
  std::uint64_t magazine_consumed_seen_ = 0;
  bool broken_ = false;
};

}  // namespace kvq

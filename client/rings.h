// The client's side of the two rings in the session segment: pages come in through the magazine, commands go out.
//
// Invariant: one thread at a time (the model's mutex); no call here enters the kernel except ring_doorbell. The daemon
// is woken only when it matters: the magazine is below half its target, the command ring more than half full, or a
// caller waits; and only once for each state it has not yet answered. Without a doorbell it looks at its next tick (10
// ms).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kvq/kill_point.h"
#include "kvq/ring_protocol.h"
#include "kvq/segment.h"

namespace kvq::client {

class Rings {
 public:
  // `segment` and `doorbell_fd` outlive the rings.
  Rings(Segment& segment, int doorbell_fd)
      : segment_(segment),
        doorbell_fd_(doorbell_fd),
        consumed_(segment.magazine.consumed.load(std::memory_order_relaxed)),
        produced_(segment.commands.produced.load(std::memory_order_relaxed)),
        given_(consumed_),
        taken_(produced_) {}

  // Unused pages at hand, as the daemon's word says now.
  std::uint32_t credits() {
    given_ = ring_produced<SharedMemory>(segment_.magazine);
    return known_credits();
  }
  // Whether `pages` unused ones are at hand. Looks at the daemon's word only when the copy of it is not enough, since
  // each look at a line that another core writes costs as much as all the rest.
  bool has_credits(std::uint32_t pages) { return known_credits() >= pages || credits() >= pages; }

  // Precondition: has_credits(1).
  MagazineItem pop_credit() {
    const MagazineItem item = ring_pop<SharedMemory>(segment_.magazine, consumed_);
    kill_point(KillPoint::client_credit_popped);
    return item;
  }

  // Whether `commands` can be pushed.
  bool has_room(std::uint32_t commands) {
    return kCommandSlots - known_waiting() >= commands || kCommandSlots - waiting_commands() >= commands;
  }

  // Precondition: has_room(1).
  void push(const Command& command) {
    ring_write<SharedMemory>(segment_.commands, produced_, command);
    kill_point(KillPoint::client_command_written);
    show_produced<SharedMemory>(segment_.commands, ++produced_);
    kill_point(KillPoint::client_command_pushed);
  }

  // After a group of pops and pushes.
  void wake_daemon_if_needed() {
    const std::uint32_t target = segment_.daemon.credits_target.load(std::memory_order_relaxed);
    if (2 * known_credits() < target && 2 * credits() < target) {
      if (given_ != rung_at_given_) ring_doorbell();
      rung_at_given_ = given_;
    }
    if (known_waiting() > kCommandSlots / 2 && waiting_commands() > kCommandSlots / 2) {
      if (taken_ != rung_at_taken_) ring_doorbell();
      rung_at_taken_ = taken_;
    }
  }

  void ring_doorbell();

 private:
  std::uint32_t known_credits() const {
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(given_ - consumed_, kMagazineSlots));
  }
  std::uint32_t known_waiting() const {
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(produced_ - taken_, kCommandSlots));
  }
  std::uint32_t waiting_commands() {
    taken_ = ring_consumed<SharedMemory>(segment_.commands);
    return known_waiting();
  }

  Segment& segment_;
  const int doorbell_fd_;
  std::uint64_t consumed_, produced_;  // copies of the words that only this side writes
  std::uint64_t given_, taken_;        // the daemon's words as last seen
  std::uint64_t rung_at_given_ = ~std::uint64_t{0}, rung_at_taken_ = ~std::uint64_t{0};
};

}  // namespace kvq::client

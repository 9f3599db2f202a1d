// The step protocol: how readers in other processes keep the places of pages from being reused, without locks or messages.
//
// Invariant: a step that is open when slots are scanned keeps every slot that its reads can reach, because it either saw the
// newer entry or is seen by the scan. The order of the lines below is the protocol; docs/epochs.md argues each.
//
//   reader                                     daemon
//   begin_step:  slot.epoch = epoch            publish:        entry = new place
//                slot.begun = serial                           limbo gets (old place, epoch)
//                fence                         advance_epoch:  epoch = epoch + 1
//                revoked? then end at once                     fence
//   load_entry, read the page                  oldest_open:    scan all slots; what was retired before the oldest open
//   end_step:    slot.ended = serial                           step's epoch may be reused
//
// A step slot is `epoch`, `begun`, `ended` (kvq/segment.h), open while begun != ended.
#pragma once

#include <algorithm>

#include "kvq/memory_site.h"
#include "kvq/types.h"

namespace kvq {

// --- the reader ---

// Whether the last step of a slot is still open, as its own session sees it.
template <typename Memory, typename Slot>
bool is_open(const Slot& slot) {
  return Memory::load(slot.begun, std::memory_order_relaxed, Site::plain) !=
         Memory::load(slot.ended, std::memory_order_acquire, Site::end_seen);
}

// The last read or write of the step comes before this.
template <typename Memory, typename Slot>
void end_step(Slot& slot, std::uint64_t serial) {
  Memory::store(slot.ended, serial, std::memory_order_release, Site::step_ended);
}

// On a slot that is not open. False: the daemon has let the session go, and the step is over already.
template <typename Memory, typename Slot, typename EpochWord, typename RevokedWord>
bool begin_step(Slot& slot, std::uint64_t serial, const EpochWord& epoch, const RevokedWord& revoked) {
  // Release, for a scan that takes this epoch for that of the slot's last step, whose end it has not seen.
  Memory::store(slot.epoch, Memory::load(epoch, std::memory_order_relaxed, Site::plain), std::memory_order_release,
                Site::step_reopened);
  Memory::store(slot.begun, serial, std::memory_order_release, Site::step_begun);
  Memory::fence(std::memory_order_seq_cst, Site::begin_step);
  if (Memory::load(revoked, std::memory_order_relaxed, Site::plain) == 0) return true;
  end_step<Memory>(slot, serial);
  return false;
}

// Inside a step. What the entry names stays as it is until the step ends.
template <typename Memory, typename EntryWord>
std::uint64_t load_entry(const EntryWord& entry) {
  return Memory::load(entry, std::memory_order_acquire, Site::entry_loaded);
}

// --- the daemon ---

// The bytes that `packed` names are written before.
template <typename Memory, typename EntryWord>
void publish_entry(EntryWord& entry, std::uint64_t packed) {
  Memory::store(entry, packed, std::memory_order_release, Site::entry_published);
}

// After everything that was published or retired in the present epoch, and before any slot is scanned.
template <typename Memory, typename EpochWord>
void advance_epoch(EpochWord& epoch) {
  const std::uint64_t now = Memory::load(epoch, std::memory_order_relaxed, Site::plain);
  Memory::store(epoch, now + 1, std::memory_order_release, Site::epoch_advanced);
  Memory::fence(std::memory_order_seq_cst, Site::advance_epoch);
}

// No step begins after this that a later scan does not see, or that does not end at once.
template <typename Memory, typename RevokedWord>
void revoke(RevokedWord& revoked) {
  Memory::store(revoked, 1, std::memory_order_relaxed, Site::plain);
  Memory::fence(std::memory_order_seq_cst, Site::revoke);
}

// As the daemon sees it. What an ended step did happened before this.
template <typename Memory, typename Slot>
bool scan_is_open(const Slot& slot) {
  const std::uint64_t begun = Memory::load(slot.begun, std::memory_order_acquire, Site::begun_scanned);
  return begun != Memory::load(slot.ended, std::memory_order_acquire, Site::end_scanned);
}

// The smallest epoch of an open step, clamped to 1..current; one past current when no step is open. What was retired in an
// earlier epoch than this may be reused.
template <typename Memory, typename Slots>
Epoch oldest_open(const Slots& slots, Epoch current) {
  std::uint64_t oldest = raw(current) + 1;
  for (const auto& slot : slots) {
    if (!scan_is_open<Memory>(slot)) continue;
    const std::uint64_t epoch = Memory::load(slot.epoch, std::memory_order_acquire, Site::epoch_scanned);
    oldest = std::min(oldest, std::clamp<std::uint64_t>(epoch, 1, raw(current)));
  }
  return Epoch{oldest};
}

template <typename Memory, typename Slots>
std::uint32_t open_steps(const Slots& slots) {
  std::uint32_t open = 0;
  for (const auto& slot : slots) open += scan_is_open<Memory>(slot) ? 1 : 0;
  return open;
}

// Whether step `serial` of this slot is over. Serials of one slot only grow, so a later end covers this step too.
template <typename Memory, typename Slot>
bool step_ended(const Slot& slot, std::uint64_t serial) {
  return Memory::load(slot.ended, std::memory_order_acquire, Site::end_scanned) >= serial;
}

}  // namespace kvq

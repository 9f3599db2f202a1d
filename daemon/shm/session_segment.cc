// Reads what a client wrote. Each atomic is loaded once and the loaded value checked.
#include "daemon/shm/session_segment.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvq {

Result<SessionSegment> SessionSegment::create(const Spec& spec) {
  Result<Memfd> memory = Memfd::create("kvq-segment", kSegmentBytes);
  if (!memory) return memory.error();
  SessionSegment out;
  out.memory_ = std::move(*memory);
  SegmentHeader& h = out.segment().header;
  h.version = kContractVersion;
  h.session = spec.session;
  h.tenant = spec.tenant;
  h.owner_pid = spec.owner_pid;
  h.bytes = kSegmentBytes;
  std::copy(spec.token.begin(), spec.token.end(), h.token);
  std::atomic_thread_fence(std::memory_order_release);
  h.magic = kSegmentMagic;
  return out;
}

std::optional<Command> SessionSegment::next_command() {
  if (broken_) return std::nullopt;
  Ring<Command, kCommandSlots>& ring = segment().commands;
  const std::uint64_t produced = ring.produced.load(std::memory_order_acquire);
  if (produced == commands_consumed_) return std::nullopt;
  if (produced - commands_consumed_ > kCommandSlots) {
    broken_ = true;
    return std::nullopt;
  }
  Command copy;
  std::memcpy(&copy, &ring.item[commands_consumed_ % kCommandSlots], sizeof copy);
  // The copy is what gets checked: the client may write the ring's memory at any time.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  ring.consumed.store(++commands_consumed_, std::memory_order_release);
  return copy;
}

std::uint32_t SessionSegment::magazine_count() {
  if (broken_) return 0;
  const std::uint64_t consumed = segment().magazine.consumed.load(std::memory_order_acquire);
  if (consumed < magazine_consumed_seen_ || consumed > magazine_produced_) {
    broken_ = true;
    return 0;
  }
  magazine_consumed_seen_ = consumed;
  return static_cast<std::uint32_t>(magazine_produced_ - consumed);
}

bool SessionSegment::push(const MagazineItem& item) {
  if (magazine_count() >= kMagazineSlots || broken_) return false;
  Ring<MagazineItem, kMagazineSlots>& ring = segment().magazine;
  ring.item[magazine_produced_ % kMagazineSlots] = item;
  ring.produced.store(++magazine_produced_, std::memory_order_release);
  return true;
}

Epoch SessionSegment::oldest_open(Epoch current) const {
  std::uint64_t oldest = raw(current) + 1;
  for (const StepSlot& slot : segment().step) {
    const std::uint64_t begun = slot.begun.load(std::memory_order_acquire);
    if (begun == slot.ended.load(std::memory_order_acquire)) continue;
    oldest = std::min(oldest, std::clamp<std::uint64_t>(slot.epoch.load(std::memory_order_relaxed), 1, raw(current)));
  }
  return Epoch{oldest};
}

std::uint32_t SessionSegment::open_steps() const {
  std::uint32_t open = 0;
  for (const StepSlot& slot : segment().step) {
    const std::uint64_t begun = slot.begun.load(std::memory_order_acquire);
    open += begun != slot.ended.load(std::memory_order_acquire) ? 1 : 0;
  }
  return open;
}

bool SessionSegment::step_ended(std::uint64_t serial) const {
  if (serial == 0) return true;
  // Serials of one slot only grow, so a later end covers this step too.
  return segment().step[serial % kStepSlots].ended.load(std::memory_order_acquire) >= serial;
}

}  // namespace kvq

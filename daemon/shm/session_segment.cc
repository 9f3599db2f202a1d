// Reads what a client wrote. Each atomic is loaded once and the loaded value checked.
#include "daemon/shm/session_segment.h"

#include <algorithm>
#include <utility>

#include "kvq/ring_protocol.h"
#include "kvq/step_protocol.h"

namespace kvq {

Result<SessionSegment> SessionSegment::create(const Spec& spec, RingCounts& counts) {
  Result<Memfd> memory = Memfd::create("kvq-segment", kSegmentBytes);
  if (!memory) return memory.error();
  SessionSegment out;
  out.memory_ = std::move(*memory);
  out.counts_ = &counts;
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

// The header lies in memory that the client may write, so it is written anew and never read.
Result<SessionSegment> SessionSegment::adopt(Descriptor& file, const Spec& spec, RingCounts& counts) {
  Result<Memfd> memory = Memfd::adopt(file, kSegmentBytes);
  if (!memory) return memory.error();
  SessionSegment out;
  out.memory_ = std::move(*memory);
  out.counts_ = &counts;
  SegmentHeader& h = out.segment().header;
  h.magic = kSegmentMagic;
  h.version = kContractVersion;
  h.session = spec.session;
  h.tenant = spec.tenant;
  h.owner_pid = spec.owner_pid;
  h.bytes = kSegmentBytes;
  std::copy(spec.token.begin(), spec.token.end(), h.token);
  return out;
}

std::optional<Command> SessionSegment::next_command() {
  if (broken_) return std::nullopt;
  Ring<Command, kCommandSlots>& ring = segment().commands;
  const std::uint64_t produced = ring_produced<SharedMemory>(ring);
  if (produced == counts_->commands_consumed) return std::nullopt;
  if (produced - counts_->commands_consumed > kCommandSlots) {
    broken_ = true;
    return std::nullopt;
  }
  // The copy is what gets checked: the client may write the ring's memory at any time.
  return ring_copy<SharedMemory>(ring, counts_->commands_consumed);
}

std::uint32_t SessionSegment::magazine_count() {
  if (broken_) return 0;
  const std::uint64_t consumed = ring_consumed<SharedMemory>(segment().magazine);
  if (consumed < magazine_consumed_seen_ || consumed > counts_->magazine_produced ||
      counts_->magazine_produced - consumed > kMagazineSlots) {
    broken_ = true;
    return 0;
  }
  magazine_consumed_seen_ = consumed;
  return static_cast<std::uint32_t>(counts_->magazine_produced - consumed);
}

bool SessionSegment::push(const MagazineItem& item) {
  if (magazine_count() >= kMagazineSlots || broken_) return false;
  ring_write<SharedMemory>(segment().magazine, counts_->magazine_produced, item);
  ++counts_->magazine_produced;
  return true;
}

void SessionSegment::show_commands() { show_consumed<SharedMemory>(segment().commands, counts_->commands_consumed); }

void SessionSegment::show_magazine() { show_produced<SharedMemory>(segment().magazine, counts_->magazine_produced); }

void SessionSegment::show() {
  show_commands();
  show_magazine();
}

Epoch SessionSegment::oldest_open(Epoch current) const {
  return kvq::oldest_open<SharedMemory>(segment().step, current);
}

std::uint32_t SessionSegment::open_steps() const { return kvq::open_steps<SharedMemory>(segment().step); }

bool SessionSegment::step_ended(std::uint64_t serial) const {
  return serial == 0 || kvq::step_ended<SharedMemory>(segment().step[serial % kStepSlots], serial);
}

bool SessionSegment::step_cut_short(std::uint64_t serial) const {
  return serial != 0 && segment().step[serial % kStepSlots].cut_short.load(std::memory_order_relaxed) == serial;
}

}  // namespace kvq

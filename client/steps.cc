// Invariant: `open_` counts what the caller has begun and not ended, whatever the device has done of it; on the host
// device a step is over when end() returns, since append and attend have returned by then.
#include "client/steps.h"

#include "client/last_error.h"
#include "kvq/kill_point.h"
#include "kvq/step_protocol.h"

namespace kvq::client {
kvq_status Steps::begin(std::uint64_t& step) {
  const std::lock_guard lock(mutex_);
  // A long step keeps its slot; the serials that would fall on it are left out, so that it holds up nobody.
  std::uint64_t serial = last() + 1;
  for (; kvq::is_open<SharedMemory>(slots_[serial % kStepSlots]); ++serial) {
    if (serial - last() < kStepSlots) continue;
    if (open() == kStepSlots) {
      return fail(KVQ_ERR_LIMIT_REACHED, "%u steps are open, the most that a session may have in flight: end one first",
                  open());
    }
    return fail(
        KVQ_ERR_LIMIT_REACHED,
        "%u steps are in flight, the most that a session may have, and %u of them still run on the GPU: wait for one",
        kStepSlots, kStepSlots - open());
  }
  StepSlot& slot = slots_[serial % kStepSlots];
  const bool begun = begin_step<SharedMemory>(slot, serial, directory_.epoch, words_.revoked);
  last_.store(serial, std::memory_order_relaxed);
  if (!begun) {
    return fail(KVQ_ERR_DAEMON_GONE,
                "kvqd has let this session go, since its connection broke; close the model and register again");
  }
  open_.fetch_add(1, std::memory_order_relaxed);
  step = serial;
  kill_point(KillPoint::client_step_begun);
  return KVQ_OK;
}

kvq_status Steps::end(std::uint64_t step, void* stream) {
  const std::lock_guard lock(mutex_);
  StepSlot& slot = slots_[step % kStepSlots];
  if (step == 0 || slot.begun.load(std::memory_order_relaxed) != step || given_[step % kStepSlots] == step ||
      slot.ended.load(std::memory_order_relaxed) == step) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "step %llu is not open; the newest is %llu",
                static_cast<unsigned long long>(step), static_cast<unsigned long long>(last()));
  }
  const kvq_status ended = ender_.end_step(slot, step, stream);
  if (ended != KVQ_OK && ended != KVQ_ERR_CONTEXT_LOST) return ended;
  given_[step % kStepSlots] = step;
  open_.fetch_sub(1, std::memory_order_relaxed);
  if (ended != KVQ_OK) end_lost_locked();
  kill_point(KillPoint::client_step_ended);
  return ended;
}

void Steps::end_now(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  kvq::end_step<SharedMemory>(slots_[step % kStepSlots], step);
  open_.fetch_sub(1, std::memory_order_relaxed);
  kill_point(KillPoint::client_step_ended);
}

void Steps::end_lost() {
  const std::lock_guard lock(mutex_);
  end_lost_locked();
}

void Steps::end_lost_locked() {
  for (std::uint32_t i = 0; i < kStepSlots; ++i) {
    if (!runs(i)) continue;
    slots_[i].cut_short.store(given_[i], std::memory_order_relaxed);
    kvq::end_step<SharedMemory>(slots_[i], given_[i]);
  }
}

bool Steps::is_open(std::uint64_t step) const {
  const std::lock_guard lock(mutex_);
  return slots_[step % kStepSlots].begun.load(std::memory_order_relaxed) == step && !is_over(step) &&
         given_[step % kStepSlots] != step;
}

std::uint32_t Steps::running() const {
  const std::lock_guard lock(mutex_);
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < kStepSlots; ++i) count += runs(i) ? 1 : 0;
  return count;
}

}  // namespace kvq::client

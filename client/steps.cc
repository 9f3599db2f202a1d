// Invariant: on the host device a step ends when the CPU says so, since append and attend have returned by then.
#include "client/steps.h"

#include "client/last_error.h"
#include "kvq/kill_point.h"
#include "kvq/step_protocol.h"

namespace kvq::client {
kvq_status Steps::begin(std::uint64_t& step) {
  const std::lock_guard lock(mutex_);
  // A long step keeps its slot; the serials that would fall on it are left out, so that it holds up nobody.
  std::uint64_t serial = last() + 1;
  for (; is_open<SharedMemory>(slots_[serial % kStepSlots]); ++serial) {
    if (serial - last() < kStepSlots) continue;
    return fail(KVQ_ERR_LIMIT_REACHED, "%u steps are open, the most that a session may have in flight: end one first",
                open());
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

kvq_status Steps::end(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  StepSlot& slot = slots_[step % kStepSlots];
  if (step == 0 || slot.begun.load(std::memory_order_relaxed) != step ||
      slot.ended.load(std::memory_order_relaxed) == step) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "step %llu is not open; the newest is %llu",
                static_cast<unsigned long long>(step), static_cast<unsigned long long>(last()));
  }
  end_step<SharedMemory>(slot, step);
  open_.fetch_sub(1, std::memory_order_relaxed);
  kill_point(KillPoint::client_step_ended);
  return KVQ_OK;
}

}  // namespace kvq::client

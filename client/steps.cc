// Invariant: on the host device a step ends when the CPU says so, since append and attend have returned by then.
#include "client/steps.h"

#include "client/last_error.h"

namespace kvq::client {

kvq_status Steps::begin(std::uint64_t& step) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t serial = last() + 1;
  StepSlot& slot = slots_[serial % kStepSlots];
  if (slot.begun.load(std::memory_order_relaxed) != slot.ended.load(std::memory_order_acquire)) {
    return fail(KVQ_ERR_LIMIT_REACHED,
                "step %llu is still open; at most %u steps of a session may be in flight: end it first",
                static_cast<unsigned long long>(slot.begun.load(std::memory_order_relaxed)), kStepSlots);
  }
  slot.epoch.store(directory_.epoch.load(std::memory_order_relaxed), std::memory_order_relaxed);
  slot.begun.store(serial, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  last_.store(serial, std::memory_order_relaxed);
  open_.fetch_add(1, std::memory_order_relaxed);
  step = serial;
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
  slot.ended.store(step, std::memory_order_release);
  open_.fetch_sub(1, std::memory_order_relaxed);
  return KVQ_OK;
}

}  // namespace kvq::client

// Steps: what keeps the places of pages from being reused while a forward pass may read them.
//
// Invariant: step s uses slot s % kStepSlots, open while begun != ended; between begin() and end() the caller may read
// the directory and what it names (kvq/step_protocol.h). A slot is begun again only after its step has ended, as seen
// in memory: on a GPU that is later than end(), which only says after what.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "client/device.h"
#include "kvq/directory.h"
#include "kvq/kvq.h"
#include "kvq/segment.h"
#include "kvq/step_protocol.h"

namespace kvq::client {

class Steps {
 public:
  // `ender` outlives the steps.
  Steps(Segment& segment, const DirectoryHeader& directory, StepEnder& ender)
      : slots_(segment.step), words_(segment.daemon), directory_(directory), ender_(ender) {}

  // LIMIT_REACHED when kStepSlots are open or running, DAEMON_GONE when the daemon has let the session go.
  kvq_status begin(std::uint64_t& step);
  // INVALID_ARGUMENT for a step that is not open. CONTEXT_LOST: it is over all the same, as are all that ran.
  kvq_status end(std::uint64_t step, void* stream);
  // For steps in which nothing was launched, or all has returned.
  void end_now(std::uint64_t step);
  // Ends what was given to end(), when the device will not.
  void end_lost();

  // Begun, and not given to end().
  std::uint32_t open() const { return open_.load(std::memory_order_relaxed); }
  // Given to end(), and not over.
  std::uint32_t running() const;
  bool is_open(std::uint64_t step) const;  // not given to end()
  bool is_over(std::uint64_t step) const { return step_ended<SharedMemory>(slots_[step % kStepSlots], step); }
  std::uint64_t last() const { return last_.load(std::memory_order_relaxed); }

 private:
  bool runs(std::uint32_t slot) const { return given_[slot] != 0 && !is_over(given_[slot]); }
  void end_lost_locked();

  StepSlot* const slots_;
  const DaemonWords& words_;
  const DirectoryHeader& directory_;
  StepEnder& ender_;
  mutable std::mutex mutex_;
  std::uint64_t given_[kStepSlots] = {};  // guarded by mutex_: the last step of each slot that was given to end()
  std::atomic<std::uint64_t> last_{0};
  std::atomic<std::uint32_t> open_{0};
};

// A step that libkvq takes for itself while it copies a page.
class InternalStep {
 public:
  explicit InternalStep(Steps& steps) : steps_(steps), status_(steps.begin(serial_)) {}
  ~InternalStep() {
    if (status_ == KVQ_OK) steps_.end_now(serial_);
  }
  InternalStep(const InternalStep&) = delete;
  InternalStep& operator=(const InternalStep&) = delete;
  kvq_status status() const { return status_; }

 private:
  Steps& steps_;
  std::uint64_t serial_ = 0;
  kvq_status status_;
};

}  // namespace kvq::client

// Steps: what keeps the places of pages from being reused while a forward pass may read them.
//
// Invariant: step s uses slot s % kStepSlots, open while begun != ended; between begin() and end() the caller may read
// the directory and what it names (kvq/step_protocol.h). A slot is begun again only after its step has ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "kvq/directory.h"
#include "kvq/kvq.h"
#include "kvq/segment.h"

namespace kvq::client {

class Steps {
 public:
  Steps(Segment& segment, const DirectoryHeader& directory)
      : slots_(segment.step), words_(segment.daemon), directory_(directory) {}

  // LIMIT_REACHED when kStepSlots are open, DAEMON_GONE when the daemon has let the session go.
  kvq_status begin(std::uint64_t& step);
  kvq_status end(std::uint64_t step);  // INVALID_ARGUMENT for a step that is not open

  std::uint32_t open() const { return open_.load(std::memory_order_relaxed); }
  std::uint64_t last() const { return last_.load(std::memory_order_relaxed); }

 private:
  StepSlot* const slots_;
  const DaemonWords& words_;
  const DirectoryHeader& directory_;
  std::mutex mutex_;
  std::atomic<std::uint64_t> last_{0};
  std::atomic<std::uint32_t> open_{0};
};

// A step that libkvq takes for itself while it copies a page.
class InternalStep {
 public:
  explicit InternalStep(Steps& steps) : steps_(steps), status_(steps.begin(serial_)) {}
  ~InternalStep() {
    if (status_ == KVQ_OK) steps_.end(serial_);
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

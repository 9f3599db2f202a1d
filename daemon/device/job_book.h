// The jobs of a device whose work a worker does: waiting, sent, answered.
//
// Invariant: each job that was submitted is answered exactly once, by its worker or, when that one is gone for good, by
// fail_all(). At most kJobsInFlight are with the worker, so its answers always have room.
#pragma once

#include <deque>
#include <unordered_set>
#include <vector>

#include "daemon/device/device.h"
#include "daemon/device/worker_link.h"

namespace kvq {

class JobBook {
 public:
  void submit(std::span<const TranscodeJob> jobs) { waiting_.insert(waiting_.end(), jobs.begin(), jobs.end()); }
  std::size_t unanswered() const { return waiting_.size() + sent_.size() + answered_.size(); }
  std::size_t with_worker() const { return sent_.size(); }

  void send(WorkerLink& link);     // what fits
  void receive(WorkerLink& link);  // what it has finished
  void take(std::vector<TranscodeDone>& done);

  // A new worker: it knows no model yet.
  void restart(WorkerLink& link);
  // Nothing of the worker writes any more.
  void fail_all();

 private:
  std::uint32_t model_number(WorkerLink& link, const ModelGeometry& geometry);
  void send_model(WorkerLink& link, std::uint32_t number);

  std::deque<TranscodeJob> waiting_;
  std::unordered_set<std::uint64_t> sent_;
  std::vector<TranscodeDone> answered_;
  std::vector<ModelGeometry> models_;  // by the number that jobs name
  std::uint32_t last_model_ = 0;
};

}  // namespace kvq

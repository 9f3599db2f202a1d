// A device that misbehaves on purpose: jobs start late, finish out of order or fail, slabs cannot be created.
//
// Invariant: everything it does follows from its seed and the calls it gets. A job runs on the inner device only when
// its delay is over, so a source slot that was reused meanwhile shows as wrong bytes.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "daemon/device/device.h"

namespace kvq::testing {

class FakeDevice final : public Device {
 public:
  struct Faults {
    std::uint32_t max_delay_polls = 0;  // a job starts after 0..this many polls
    double fail_passing = 0;            // jobs that fail for a passing reason
    double fail_for_good = 0;           // jobs that fail because of the page's values
    double fail_create = 0;             // create_slab calls that find no memory
  };

  FakeDevice(std::unique_ptr<Device> inner, std::uint64_t seed) : inner_(std::move(inner)), random_(seed) {}
  // The device of a next daemon: jobs of the old one are gone.
  void replace(std::unique_ptr<Device> inner) {
    inner_ = std::move(inner);
    waiting_.clear();
  }
  Faults faults;
  bool hold_jobs = false;  // nothing starts until this is false again

  std::string name() const override { return inner_->name(); }
  std::uint64_t arena_bytes() const override { return inner_->arena_bytes(); }
  std::uint64_t slab_bytes() const override { return inner_->slab_bytes(); }

  Result<void> create_slab(SlabId slab) override {
    if (chance(faults.fail_create)) return Error{Errc::system, 12, "injected: no memory for a slab"};
    return inner_->create_slab(slab);
  }
  Result<void> adopt_slab(SlabId slab, Descriptor& file) override { return inner_->adopt_slab(slab, file); }
  void destroy_slab(SlabId slab) override { inner_->destroy_slab(slab); }
  int descriptor(SlabId slab, bool writable) const override { return inner_->descriptor(slab, writable); }

  void submit(std::span<const TranscodeJob> jobs) override {
    for (const TranscodeJob& job : jobs)
      waiting_.push_back({job, static_cast<std::uint32_t>(random_() % (faults.max_delay_polls + 1))});
    submitted += jobs.size();
  }

  void poll(std::vector<TranscodeDone>& done) override {
    if (!hold_jobs) start_due(done);
    inner_->poll(done);
    if (faults.max_delay_polls > 0) std::shuffle(done.begin(), done.end(), random_);
  }

  std::size_t in_flight() const override { return waiting_.size() + inner_->in_flight(); }

  std::size_t submitted = 0;

 private:
  struct Waiting {
    TranscodeJob job;
    std::uint32_t polls;
  };

  bool chance(double p) { return p > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < p; }

  void start_due(std::vector<TranscodeDone>& done) {
    std::vector<Waiting> later;
    for (Waiting& w : waiting_) {
      if (w.polls > 0) {
        --w.polls;
        later.push_back(w);
      } else if (chance(faults.fail_passing)) {
        done.push_back({w.job.id, {Errc::system, 5, "injected: the device was busy"}, 0});
      } else if (chance(faults.fail_for_good)) {
        done.push_back({w.job.id, {Errc::invalid_argument, 0, "injected: values out of range"}, 0});
      } else {
        inner_->submit({&w.job, 1});
      }
    }
    waiting_ = std::move(later);
  }

  std::unique_ptr<Device> inner_;
  std::mt19937_64 random_;
  std::vector<Waiting> waiting_;
};

// Runs at once, on this thread.
inline RunBlocking run_inline() {
  return [](std::function<void()> work, std::function<void()> done) {
    work();
    done();
  };
}

}  // namespace kvq::testing

// A device that misbehaves on purpose: jobs start late, finish out of order or fail, slabs cannot be created, mirrors
// lag.
//
// Invariant: everything it does follows from its seed and the calls it gets. A job runs on the inner device only when
// its delay is over, so a source slot that was reused meanwhile shows as wrong bytes. Each job is compared with all
// that are not answered yet: one that depends on another is a failure.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "daemon/device/device.h"
#include "daemon/shm/memfd.h"

namespace kvq::testing {

class FakeDevice final : public Device {
 public:
  struct Faults {
    std::uint32_t max_delay_polls = 0;  // a job starts after 0..this many polls
    double fail_passing = 0;            // jobs that fail for a passing reason
    double fail_lost = 0;               // jobs whose worker dies under them
    double fail_for_good = 0;           // jobs that fail because of the page's values
    double fail_create = 0;             // create_slab calls that find no memory
    std::uint32_t mirror_lag = 0;       // 0: no mirrors; else an entry takes this many ticks to get there, on average
  };

  FakeDevice(std::unique_ptr<Device> inner, std::uint64_t seed) : inner_(std::move(inner)), random_(seed) {}
  // The device of a next daemon: jobs of the old one are gone.
  void replace(std::unique_ptr<Device> inner) {
    inner_ = std::move(inner);
    waiting_.clear();
    unanswered_.clear();
    mirrors_.clear();
    unwritten_.clear();
    publications_ = published_ = 0;
  }
  Faults faults;
  bool hold_jobs = false;    // nothing starts until this is false again
  bool hold_checks = false;  // likewise, for jobs that only sum up

  std::string name() const override { return inner_->name(); }
  std::uint64_t arena_bytes() const override { return inner_->arena_bytes(); }
  std::uint64_t slab_bytes() const override { return inner_->slab_bytes(); }
  std::uint64_t asked_bytes() const override { return inner_->asked_bytes(); }
  std::uint64_t most_bytes() const override { return inner_->most_bytes(); }
  bool can_resize() const override { return inner_->can_resize(); }
  void resize(std::uint64_t bytes) override { inner_->resize(bytes); }

  Result<void> create_slab(SlabId slab) override {
    if (chance(faults.fail_create)) return Error{Errc::system, 12, "injected: no memory for a slab"};
    return inner_->create_slab(slab);
  }
  Result<void> adopt_slab(SlabId slab, Descriptor& file, std::uint64_t serial) override {
    return inner_->adopt_slab(slab, file, serial);
  }
  std::uint64_t slab_serial(SlabId slab) const override { return inner_->slab_serial(slab); }
  void destroy_slab(SlabId slab) override { inner_->destroy_slab(slab); }
  int descriptor(SlabId slab, bool writable) const override { return inner_->descriptor(slab, writable); }

  bool has_mirrors() const override { return faults.mirror_lag > 0 || !mirrors_.empty(); }
  void add_mirror(TenantId tenant, const DirectoryEntry* entries, std::uint32_t capacity, Descriptor adopted) override {
    if (!has_mirrors()) return;
    const std::uint64_t bytes = capacity * sizeof(std::uint64_t);
    Result<Memfd> file = adopted.get() >= 0 ? Memfd::adopt(adopted, bytes) : Memfd::create("kvq-mirror", bytes);
    ASSERT_TRUE(file) << file.error().context;
    mirrors_[tenant] = {std::move(*file), static_cast<std::uint32_t>(random_() % faults.mirror_lag)};
    for (std::uint32_t i = 0; i < capacity; ++i) {
      publish(tenant, PageId{i}, entries[i].load(std::memory_order_relaxed));
    }
  }
  int mirror_descriptor(TenantId tenant) const override {
    const auto found = mirrors_.find(tenant);
    return found == mirrors_.end() || found->second.ticks_to_come > 0 ? -1 : found->second.file.descriptor();
  }
  void publish(TenantId tenant, PageId page, std::uint64_t entry) override {
    if (!has_mirrors()) return;
    unwritten_.push_back({tenant, page, entry});
    ++publications_;
  }
  std::uint64_t publications() const override { return publications_; }
  std::uint64_t published() const override { return published_; }
  void advance(std::uint64_t) override {
    for (auto& [tenant, mirror] : mirrors_) mirror.ticks_to_come -= mirror.ticks_to_come > 0 ? 1 : 0;
    if (!unwritten_.empty() && faults.mirror_lag > 1 && random_() % faults.mirror_lag != 0) return;
    for (std::size_t n = unwritten_.empty() ? 0 : 1 + random_() % unwritten_.size(); n > 0; --n) {
      const Unwritten& u = unwritten_.front();
      auto* entries = reinterpret_cast<DirectoryEntry*>(mirrors_.at(u.tenant).file.data());
      entries[raw(u.page)].store(u.entry, std::memory_order_release);
      unwritten_.pop_front();
      ++published_;
    }
  }

  std::uint32_t checks_at_once() const override { return checks; }
  void set_urgent(bool now) override { urgent = now; }
  void submit(std::span<const TranscodeJob> jobs) override {
    for (const TranscodeJob& job : jobs) {
      expect_independent(job);
      waiting_.push_back({job, static_cast<std::uint32_t>(random_() % (faults.max_delay_polls + 1))});
    }
    submitted += jobs.size();
  }

  void poll(std::vector<TranscodeDone>& done) override {
    const std::size_t before = done.size();
    if (!hold_jobs) start_due(done);
    inner_->poll(done);
    for (std::size_t i = before; i < done.size(); ++i) unanswered_.erase(done[i].id);
    if (faults.max_delay_polls > 0) std::shuffle(done.begin(), done.end(), random_);
  }

  std::size_t in_flight() const override { return waiting_.size() + inner_->in_flight(); }

  std::size_t submitted = 0;
  std::uint32_t checks = 16;
  bool urgent = false;  // as last told
  // Jobs that write a slot which a check, not answered yet, still reads.
  std::size_t written_under_checks = 0;

 private:
  struct Mirror {
    Memfd file;
    std::uint32_t ticks_to_come = 0;
  };
  struct Unwritten {
    TenantId tenant;
    PageId page;
    std::uint64_t entry;
  };
  struct Waiting {
    TranscodeJob job;
    std::uint32_t polls;
  };

  static bool overlap(std::uint64_t a, const PageLayout* x, std::uint64_t b, const PageLayout* y) {
    return x != nullptr && y != nullptr && a < b + y->page_bytes && b < a + x->page_bytes;
  }
  void expect_independent(const TranscodeJob& job) {
    for (const auto& [id, other] : unanswered_) {
      EXPECT_FALSE(overlap(job.source_bytes, job.from, other.destination_bytes, other.to))
          << "job " << job.id << " reads what job " << id << " writes";
      EXPECT_FALSE(overlap(job.destination_bytes, job.to, other.destination_bytes, other.to))
          << "jobs " << job.id << " and " << id << " write one slot";
      const bool reads = overlap(job.destination_bytes, job.to, other.source_bytes, other.from);
      EXPECT_FALSE(reads && other.to != nullptr) << "job " << job.id << " writes what job " << id << " reads";
      written_under_checks += reads ? 1 : 0;
    }
    unanswered_.emplace(job.id, job);
  }
  bool chance(double p) { return p > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < p; }

  void start_due(std::vector<TranscodeDone>& done) {
    std::vector<Waiting> later;
    for (Waiting& w : waiting_) {
      if (w.polls > 0 || (hold_checks && w.job.to == nullptr)) {
        w.polls -= w.polls > 0 ? 1 : 0;
        later.push_back(w);
      } else if (chance(faults.fail_passing)) {
        done.push_back({w.job.id, {Errc::system, 5, "injected: the device was busy"}, 0});
      } else if (chance(faults.fail_lost)) {
        done.push_back({w.job.id, {Errc::context_lost, 0, "injected: its worker has ended"}, 0});
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
  std::map<std::uint64_t, TranscodeJob> unanswered_;
  std::map<TenantId, Mirror> mirrors_;
  std::deque<Unwritten> unwritten_;
  std::uint64_t publications_ = 0, published_ = 0;
};

// Runs at once, on this thread.
inline RunBlocking run_inline() {
  return [](std::function<void()> work, std::function<void()> done) {
    work();
    done();
  };
}

}  // namespace kvq::testing

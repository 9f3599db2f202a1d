// A device over the fake worker, a directory, and what must hold of both at all times.
//
// Invariant: every call that must not wait is timed; every publication is looked up in the mirror as soon as it is said
// to be there; every answer of a job is counted.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <thread>

#include "daemon/device/worker_device.h"
#include "tests/support/file_bytes.h"

namespace kvq::testing {

using Clock = std::chrono::steady_clock;

inline constexpr std::uint64_t kSlab = 65536;
inline constexpr std::uint32_t kSlabs = 6, kEntries = 3000;
inline constexpr std::uint64_t kDensePage = 16384, kColdPage = 4608;
inline constexpr std::uint64_t kLongestCallUs = 200'000;  // a spawn, under sanitizers, on a busy machine

inline std::uint64_t clock_ms() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count());
}

inline std::string temporary(const std::string& name) {
  return ::testing::TempDir() + "kvq_worker_" + std::to_string(::getpid()) + "_" + name;
}

// A device over the fake worker, a directory, and what must hold of both.
class WorkerTest : public ::testing::Test {
 protected:
  WorkerTest() : entries(kEntries), once(temporary("once")) {
    geometry.layers = 1;
    geometry.layer[0] = {1, 64, Dtype::fp16, 0};
    dense = make_layout(geometry, Format::dense);
    cold = make_layout(geometry, Format::int4);
    for (std::uint32_t i = 0; i < kEntries; ++i) entries[i] = 7'000'000 + i;
    ::unlink(once.c_str());
    faults("");
  }
  ~WorkerTest() override {
    ::unlink(once.c_str());
    ::unsetenv("KVQ_FAKE_GPU");
  }

  // Of the workers that start from now on. Faults that end or hang one strike once.
  void faults(const std::string& text) {
    ::setenv("KVQ_FAKE_GPU", (text.empty() ? "" : text + ",once=" + once).c_str(), 1);
  }
  WorkerOptions options() {
    WorkerOptions o;
    o.command = {FAKE_GPU_WORKER_PATH};
    o.slab_bytes = kSlab;
    o.arena_bytes = kSlabs * kSlab;
    o.deadline_ms = 200;
    o.start_ms = 2000;
    o.first_pause_ms = 10;
    o.longest_pause_ms = 100;
    o.keep_worker = [this](int pidfd) { worker = Descriptor(::fcntl(pidfd, F_DUPFD_CLOEXEC, 0)); };
    o.log = [this](const std::string& line) { lines.push_back(line); };
    return o;
  }
  void start() { start(options()); }
  void start(WorkerOptions o) {
    MadeWorkerDevice made = make_worker_device(std::move(o));
    ASSERT_NE(made.device, nullptr) << made.why_not;
    device = std::move(made.device);
  }
  void signal(int number) const { ::syscall(SYS_pidfd_send_signal, worker.get(), number, nullptr, 0); }

  // Each call of the device is timed: it never waits for its worker.
  template <typename Call>
  auto timed(const Call& call) {
    const auto begin = Clock::now();
    struct Note {
      Clock::time_point begin;
      std::uint64_t& longest;
      ~Note() {
        const auto us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
        longest = std::max(longest, static_cast<std::uint64_t>(us));
      }
    } note{begin, longest_us};
    return call();
  }
  void turn() {
    timed([&] { device->advance(clock_ms()); });
    std::vector<TranscodeDone> done;
    timed([&] { device->poll(done); });
    for (const TranscodeDone& d : done) {
      ++answers[d.id];
      last_error[d.id] = d.error;
    }
    check_published();
  }
  template <typename Done>
  bool until(const Done& done, std::uint64_t most_ms = 20'000) {
    for (const std::uint64_t end = clock_ms() + most_ms; clock_ms() < end;) {
      turn();
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return false;
  }
  bool settled() {
    return until([&] {
      return device->in_flight() == 0 && device->published() == device->publications() && !device->health().degraded;
    });
  }

  // --- the mirror ---
  void add_mirror() { device->add_mirror(TenantId{1}, entries.data(), kEntries, {}); }
  void open_mirror() {
    ASSERT_TRUE(until([&] { return device->mirror_descriptor(TenantId{1}) >= 0; }));
    mirror =
        std::make_unique<FileBytes>(device->mirror_descriptor(TenantId{1}), (kEntries * 8 + 4095) / 4096 * 4096, false);
    ASSERT_TRUE(mirror->ok());
  }
  std::uint64_t mirror_at(std::uint32_t page) const {
    std::uint64_t word = 0;
    mirror->read(page * sizeof(word), &word, sizeof(word));
    return word;
  }
  // Values only grow, so what was published by then shows as the value or a later one.
  void publish(std::uint32_t page) {
    entries[page] += kEntries;
    timed([&] { device->publish(TenantId{1}, PageId{page}, entries[page].load()); });
    owed[device->publications()] = {page, entries[page].load()};
  }
  void check_published() {
    const std::uint64_t published = device->published();
    EXPECT_GE(published, last_published) << "it went back";
    last_published = published;
    while (mirror != nullptr && !owed.empty() && owed.begin()->first <= published) {
      const auto [page, value] = owed.begin()->second;
      ASSERT_GE(mirror_at(page), value) << "published before it is visible";
      owed.erase(owed.begin());
    }
  }
  void expect_mirror_equals_directory() {
    for (std::uint32_t i = 0; i < kEntries; ++i) ASSERT_EQ(mirror_at(i), entries[i].load()) << i;
  }

  // --- slabs and jobs ---
  void fill(SlabId slab, std::uint16_t value) {
    const std::vector<std::uint16_t> words(kSlab / 2, value);
    FileBytes(device->descriptor(slab, true), kSlab, true).write(0, words.data(), kSlab);
  }
  std::uint16_t first_value(SlabId slab) const {
    std::uint16_t value = 0;
    FileBytes(device->descriptor(slab, false), kSlab, false).read(0, &value, 2);
    return value;
  }
  void submit(std::uint64_t source, std::uint64_t destination) {
    const TranscodeJob job{++last_job, &geometry, &dense, &cold, source, destination};
    timed([&] { device->submit({&job, 1}); });
  }
  void expect_each_job_answered_once() {
    EXPECT_EQ(answers.size(), last_job);
    for (std::uint64_t id = 1; id <= last_job; ++id) ASSERT_EQ(answers[id], 1) << id;
  }

  std::vector<DirectoryEntry> entries;
  const std::string once;
  std::vector<std::string> lines;
  Descriptor worker;
  std::unique_ptr<Device> device;
  std::unique_ptr<FileBytes> mirror;
  ModelGeometry geometry;
  PageLayout dense, cold;
  std::map<std::uint64_t, int> answers;
  std::map<std::uint64_t, Error> last_error;
  std::map<std::uint64_t, std::pair<std::uint32_t, std::uint64_t>> owed;  // by publication: page and value
  std::uint64_t last_job = 0, last_published = 0, longest_us = 0;
};

}  // namespace kvq::testing

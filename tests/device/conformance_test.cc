// The suite for devices on the host: memory files, one that misbehaves, and a worker process with memory files.
#include "tests/device/conformance.h"

#include <stdexcept>

#include "daemon/device/worker_device.h"
#include "tests/support/fake_device.h"
#include "tests/support/file_bytes.h"

namespace kvq::testing {
namespace {

constexpr std::uint64_t kSlab = 65536, kArena = 4 * kSlab;

struct FileKind {
  using Bytes = FileBytes;
  static constexpr std::uint64_t kSlab = testing::kSlab, kGranularity = 4096;
  static constexpr bool kNarrows = true, kOutlives = true;
};

struct HostKind : FileKind {
  std::unique_ptr<Device> make() { return make_host_device(kArena, kSlab, run_inline()); }
  std::unique_ptr<Device> make_next() { return make(); }
};

struct FakeKind : FileKind {
  std::unique_ptr<Device> make() {
    auto device = std::make_unique<FakeDevice>(make_host_device(kArena, kSlab, run_inline()), 7);
    device->faults.max_delay_polls = 3;
    return device;
  }
  std::unique_ptr<Device> make_next() { return make(); }
};

std::unique_ptr<Device> worker(const char* exporter, std::uint64_t kept) {
  MadeWorkerDevice made = make_worker_device({.command = {FAKE_GPU_WORKER_PATH, "--uuid", "", "--export", exporter},
                                              .slab_bytes = kSlab,
                                              .arena_bytes = kArena,
                                              .kept_arena_bytes = kept});
  if (made.device == nullptr) throw std::runtime_error(made.why_not);
  return std::move(made.device);
}

struct WorkerKind : FileKind {
  std::unique_ptr<Device> make() { return worker("vmm", 0); }
  std::unique_ptr<Device> make_next() { return worker("vmm", kArena); }
};

struct LegacyWorkerKind : FileKind {
  static constexpr bool kOutlives = false;
  std::unique_ptr<Device> make() { return worker("legacy", 0); }
  std::unique_ptr<Device> make_next() { return worker("legacy", kArena); }
};

INSTANTIATE_TYPED_TEST_SUITE_P(Host, DeviceConformance, HostKind);
INSTANTIATE_TYPED_TEST_SUITE_P(Fake, DeviceConformance, FakeKind);
INSTANTIATE_TYPED_TEST_SUITE_P(Worker, DeviceConformance, WorkerKind);
INSTANTIATE_TYPED_TEST_SUITE_P(LegacyWorker, DeviceConformance, LegacyWorkerKind);

TEST(HostDevice, RefusesSizesThatDoNotFit) {
  EXPECT_THROW(make_host_device(kArena, 4097, run_inline()), std::invalid_argument);
  EXPECT_THROW(make_host_device(kArena + 4096, kSlab, run_inline()), std::invalid_argument);
  EXPECT_THROW(make_host_device(0, kSlab, run_inline()), std::invalid_argument);
}

TEST(HostDevice, JobsOutliveTheDevice) {
  std::vector<std::pair<std::function<void()>, std::function<void()>>> pending;
  auto device = make_host_device(kArena, kSlab, [&](auto work, auto done) { pending.emplace_back(work, done); });
  ModelGeometry g;
  g.layers = 1;
  g.layer[0] = {1, 64, Dtype::fp16, 0};
  const PageLayout dense = make_layout(g, Format::dense);
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  const TranscodeJob copy{1, &g, &dense, &dense, 0, 16384};
  device->submit({&copy, 1});
  device.reset();
  for (auto& [work, done] : pending) {
    work();
    done();
  }
}

TEST(HostDeviceDeathTest, PlaceOfADestroyedSlabIsInaccessible) {
  auto device = make_host_device(kArena, kSlab, run_inline());
  ModelGeometry g;
  g.layers = 1;
  g.layer[0] = {1, 64, Dtype::fp16, 0};
  const PageLayout dense = make_layout(g, Format::dense);
  ASSERT_TRUE(device->create_slab(SlabId{0}));
  device->destroy_slab(SlabId{0});
  const TranscodeJob wild{1, &g, &dense, &dense, 0, 16384};
  EXPECT_DEATH(device->submit({&wild, 1}), "");
}

}  // namespace
}  // namespace kvq::testing

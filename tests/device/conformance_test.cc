// What every device must do, run for each kind. A new kind joins by one more type in the list.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>

#include "tests/support/fake_device.h"

namespace kvq::testing {
namespace {

constexpr std::uint64_t kSlab = 65536, kArena = 4 * kSlab;

struct HostKind {
  static std::unique_ptr<Device> make() { return make_host_device(kArena, kSlab, run_inline()); }
};
struct FakeKind {
  static std::unique_ptr<Device> make() {
    auto device = std::make_unique<FakeDevice>(make_host_device(kArena, kSlab, run_inline()), 7);
    device->faults.max_delay_polls = 3;
    return device;
  }
};

// A slab as an importer maps it.
struct Mapping {
  Mapping(int fd, bool writable)
      : base(static_cast<std::uint8_t*>(
            ::mmap(nullptr, kSlab, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0))) {}
  ~Mapping() {
    if (base != MAP_FAILED) ::munmap(base, kSlab);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::uint8_t* base;
};

template <typename Kind>
class DeviceConformance : public ::testing::Test {
 protected:
  DeviceConformance() : device(Kind::make()) {
    geometry.layers = 1;
    geometry.layer[0] = {1, 64, Dtype::fp16, 0};
    dense = make_layout(geometry, Format::dense);
    cold = make_layout(geometry, Format::int4);
  }
  TranscodeJob job(std::uint64_t id, const PageLayout& from, const PageLayout& to, std::uint64_t source,
                   std::uint64_t destination) {
    return {id, &geometry, &from, &to, source, destination};
  }
  std::vector<TranscodeDone> finish() {
    std::vector<TranscodeDone> done;
    while (device->in_flight() > 0) device->poll(done);
    return done;
  }
  void fill(SlabId slab, std::uint64_t offset, std::uint16_t value) {
    Mapping m(device->descriptor(slab, true), true);
    for (std::uint64_t i = 0; i < dense.page_bytes; i += 2) std::memcpy(m.base + offset + i, &value, 2);
  }

  std::unique_ptr<Device> device;
  ModelGeometry geometry;
  PageLayout dense, cold;
};

using Kinds = ::testing::Types<HostKind, FakeKind>;
TYPED_TEST_SUITE(DeviceConformance, Kinds);

TYPED_TEST(DeviceConformance, NewSlabIsZeroAlsoWhenItsPlaceWasUsedBefore) {
  ASSERT_TRUE(this->device->create_slab(SlabId{2}));
  this->fill(SlabId{2}, 0, 0x3c00);
  this->device->destroy_slab(SlabId{2});
  ASSERT_TRUE(this->device->create_slab(SlabId{2}));
  Mapping m(this->device->descriptor(SlabId{2}, false), false);
  ASSERT_NE(m.base, MAP_FAILED);
  for (std::uint64_t i = 0; i < kSlab; ++i) ASSERT_EQ(m.base[i], 0);
}

TYPED_TEST(DeviceConformance, ReadOnlyDescriptorCannotBeMappedWritable) {
  ASSERT_TRUE(this->device->create_slab(SlabId{0}));
  Mapping reader(this->device->descriptor(SlabId{0}, false), true);
  EXPECT_EQ(reader.base, MAP_FAILED);
  Mapping writer(this->device->descriptor(SlabId{0}, true), true);
  EXPECT_NE(writer.base, MAP_FAILED);
}

TYPED_TEST(DeviceConformance, ImporterCannotTruncateASlab) {
  ASSERT_TRUE(this->device->create_slab(SlabId{0}));
  EXPECT_NE(::ftruncate(this->device->descriptor(SlabId{0}, true), 0), 0);
  EXPECT_NE(::ftruncate(this->device->descriptor(SlabId{0}, false), 0), 0);
}

TYPED_TEST(DeviceConformance, ImportersMappingOutlivesTheSlab) {
  ASSERT_TRUE(this->device->create_slab(SlabId{1}));
  this->fill(SlabId{1}, 0, 0x4000);
  Mapping m(this->device->descriptor(SlabId{1}, false), false);
  this->device->destroy_slab(SlabId{1});
  EXPECT_EQ(m.base[1], 0x40);
}

TYPED_TEST(DeviceConformance, TranscodeReachesInt4AndBackAndLeavesItsSource) {
  ASSERT_TRUE(this->device->create_slab(SlabId{0}));
  ASSERT_TRUE(this->device->create_slab(SlabId{3}));
  const std::uint16_t value = 0x3555;
  this->fill(SlabId{0}, 16384, value);
  const TranscodeJob there = this->job(1, this->dense, this->cold, 16384, 3 * kSlab + 4608);
  this->device->submit({&there, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  const TranscodeJob back = this->job(2, this->cold, this->dense, 3 * kSlab + 4608, 32768);
  this->device->submit({&back, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  Mapping m(this->device->descriptor(SlabId{0}, false), false);
  EXPECT_EQ(std::memcmp(m.base + 16384, m.base + 32768, 16384), 0);
  std::uint16_t first;
  std::memcpy(&first, m.base + 32768, 2);
  EXPECT_EQ(first, value);
}

TYPED_TEST(DeviceConformance, EqualFormatsCopy) {
  ASSERT_TRUE(this->device->create_slab(SlabId{0}));
  ASSERT_TRUE(this->device->create_slab(SlabId{1}));
  this->fill(SlabId{0}, 0, 0x1234);
  const TranscodeJob copy = this->job(1, this->dense, this->dense, 0, kSlab);
  this->device->submit({&copy, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  Mapping a(this->device->descriptor(SlabId{0}, false), false), b(this->device->descriptor(SlabId{1}, false), false);
  EXPECT_EQ(std::memcmp(a.base, b.base, 16384), 0);
}

TYPED_TEST(DeviceConformance, NonFiniteValuesFailWithAReason) {
  ASSERT_TRUE(this->device->create_slab(SlabId{0}));
  this->fill(SlabId{0}, 0, 0x7c00);  // infinity
  const TranscodeJob bad = this->job(9, this->dense, this->cold, 0, 32768);
  this->device->submit({&bad, 1});
  const auto done = this->finish();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, 9u);
  EXPECT_EQ(done[0].error.code, Errc::invalid_argument);
  EXPECT_STRNE(done[0].error.context, "");
}

TYPED_TEST(DeviceConformance, EachJobIsAnsweredOnce) {
  ASSERT_TRUE(this->device->create_slab(SlabId{0}));
  ASSERT_TRUE(this->device->create_slab(SlabId{1}));
  std::vector<TranscodeJob> jobs;
  for (std::uint64_t i = 0; i < 14; ++i)
    jobs.push_back(this->job(100 + i, this->dense, this->cold, 0, kSlab + i * 4608));
  this->device->submit(jobs);
  std::multiset<std::uint64_t> ids;
  for (const TranscodeDone& d : this->finish()) ids.insert(d.id);
  EXPECT_EQ(ids.size(), 14u);
  for (std::uint64_t i = 0; i < 14; ++i) EXPECT_EQ(ids.count(100 + i), 1u);
  EXPECT_EQ(this->device->in_flight(), 0u);
}

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

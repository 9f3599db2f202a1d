// What every device must do. A kind of device joins by a file that instantiates the suite with a Kind:
//
//   kSlab                      bytes of a slab; the arena has four
//   kNarrows                   whether a read-only descriptor cannot be mapped writable
//   kOutlives                  whether memory outlives the slab for whoever maps it, and the device for whoever adopts
//   it make(), make_next()        a new device, and one that will adopt what the first made Bytes(fd, bytes, writable)
//   an importer's view of a slab or mirror: ok(), read(offset, to, count), write(offset, from,
//                              count); it lives on when the device has given the memory back
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "daemon/device/device.h"

namespace kvq::testing {

inline std::uint64_t clock_ms() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

template <typename Kind>
class DeviceConformance : public ::testing::Test {
 protected:
  using Bytes = typename Kind::Bytes;
  static constexpr std::uint64_t kSlab = Kind::kSlab;

  DeviceConformance() : device(kind.make()) {
    geometry.layers = 1;
    geometry.layer[0] = {1, 64, Dtype::fp16, 0};
    dense = make_layout(geometry, Format::dense);
    cold = make_layout(geometry, Format::int4);
  }
  TranscodeJob job(std::uint64_t id, const PageLayout& from, const PageLayout& to, std::uint64_t source,
                   std::uint64_t destination) {
    return {id, &geometry, &from, &to, source, destination};
  }
  // Lets time pass until `done`, for at most 20 seconds.
  template <typename Done>
  bool until(const Done& done) {
    for (const std::uint64_t end = clock_ms() + 20'000; clock_ms() < end;) {
      device->advance(clock_ms());
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return false;
  }
  std::vector<TranscodeDone> finish() {
    std::vector<TranscodeDone> done;
    EXPECT_TRUE(until([&] {
      device->poll(done);
      return device->in_flight() == 0;
    }));
    return done;
  }
  bool create(SlabId slab) {  // a device may need a moment after it gave memory back
    return until([&] { return static_cast<bool>(device->create_slab(slab)); });
  }
  void fill(SlabId slab, std::uint64_t offset, std::uint16_t value) {
    const std::vector<std::uint16_t> page(dense.page_bytes / 2, value);
    Bytes bytes(device->descriptor(slab, true), kSlab, true);
    ASSERT_TRUE(bytes.ok());
    bytes.write(offset, page.data(), dense.page_bytes);
  }
  std::vector<std::uint8_t> bytes_at(SlabId slab, std::uint64_t offset, std::uint64_t count) {
    std::vector<std::uint8_t> out(count);
    Bytes bytes(device->descriptor(slab, false), kSlab, false);
    EXPECT_TRUE(bytes.ok());
    if (bytes.ok()) bytes.read(offset, out.data(), count);
    return out;
  }

  // --- mirrors ---
  static constexpr std::uint32_t kEntries = 5000;
  static std::vector<DirectoryEntry> directory() {
    std::vector<DirectoryEntry> entries(kEntries);
    for (std::uint32_t i = 0; i < kEntries; ++i) entries[i] = 1'000'000 + i;
    return entries;
  }
  static std::uint64_t mirror_bytes() {
    return (kEntries * sizeof(DirectoryEntry) + Kind::kGranularity - 1) / Kind::kGranularity * Kind::kGranularity;
  }
  std::vector<std::uint64_t> mirror(TenantId tenant) {
    std::vector<std::uint64_t> out(kEntries);
    Bytes bytes(device->mirror_descriptor(tenant), mirror_bytes(), false);
    EXPECT_TRUE(bytes.ok());
    if (bytes.ok()) bytes.read(0, out.data(), kEntries * sizeof(std::uint64_t));
    return out;
  }
  void publish(std::vector<DirectoryEntry>& entries, TenantId tenant, std::uint32_t page, std::uint64_t value) {
    entries[page] = value;
    device->publish(tenant, PageId{page}, value);
  }
  bool await_mirror(TenantId tenant) {
    return until(
        [&] { return device->mirror_descriptor(tenant) >= 0 && device->published() == device->publications(); });
  }

  Kind kind;
  std::vector<DirectoryEntry> first_entries = directory(), second_entries = directory();
  std::unique_ptr<Device> device;
  ModelGeometry geometry;
  PageLayout dense, cold;
};

TYPED_TEST_SUITE_P(DeviceConformance);

TYPED_TEST_P(DeviceConformance, NewSlabIsZeroAlsoWhenItsPlaceWasUsedBefore) {
  ASSERT_TRUE(this->create(SlabId{2}));
  this->fill(SlabId{2}, 0, 0x3c00);
  this->device->destroy_slab(SlabId{2});
  ASSERT_TRUE(this->create(SlabId{2}));
  const std::vector<std::uint8_t> zeros(this->kSlab);
  EXPECT_EQ(this->bytes_at(SlabId{2}, 0, this->kSlab), zeros);
}

TYPED_TEST_P(DeviceConformance, AllSlabsOfTheArenaCanBeHadAgainAndAgain) {
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < this->device->slabs(); ++i) ASSERT_TRUE(this->create(SlabId{i}));
    for (std::uint32_t i = 0; i < this->device->slabs(); ++i) this->device->destroy_slab(SlabId{i});
  }
}

TYPED_TEST_P(DeviceConformance, ReadOnlyDescriptorCannotBeMappedWritable) {
  ASSERT_TRUE(this->create(SlabId{0}));
  typename TypeParam::Bytes reader(this->device->descriptor(SlabId{0}, false), this->kSlab, true);
  EXPECT_EQ(reader.ok(), !TypeParam::kNarrows);
  typename TypeParam::Bytes writer(this->device->descriptor(SlabId{0}, true), this->kSlab, true);
  EXPECT_TRUE(writer.ok());
}

TYPED_TEST_P(DeviceConformance, ImporterCannotTruncateASlab) {
  ASSERT_TRUE(this->create(SlabId{0}));
  EXPECT_NE(::ftruncate(this->device->descriptor(SlabId{0}, true), 0), 0);
  EXPECT_NE(::ftruncate(this->device->descriptor(SlabId{0}, false), 0), 0);
}

TYPED_TEST_P(DeviceConformance, ImportersMappingOutlivesTheSlab) {
  ASSERT_TRUE(this->create(SlabId{1}));
  this->fill(SlabId{1}, 0, 0x4000);
  typename TypeParam::Bytes m(this->device->descriptor(SlabId{1}, false), this->kSlab, false);
  this->device->destroy_slab(SlabId{1});
  ASSERT_TRUE(m.ok());
  std::uint8_t second = 0;
  m.read(1, &second, 1);  // without a fault, whoever has the place by now
  if (TypeParam::kOutlives) {
    EXPECT_EQ(second, 0x40);
  }
}

TYPED_TEST_P(DeviceConformance, SerialsNameTheMemoryNotThePlace) {
  std::set<std::uint64_t> serials;
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(this->create(SlabId{i}));
      EXPECT_NE(this->device->slab_serial(SlabId{i}), 0u);
      EXPECT_TRUE(serials.insert(this->device->slab_serial(SlabId{i})).second);
    }
    for (std::uint32_t i = 0; i < 2; ++i) this->device->destroy_slab(SlabId{i});
  }
}

TYPED_TEST_P(DeviceConformance, NextDeviceAdoptsASlabWithItsContentAndSerial) {
  ASSERT_TRUE(this->create(SlabId{3}));
  this->fill(SlabId{3}, 0, 0x3555);
  const std::uint64_t serial = this->device->slab_serial(SlabId{3});
  Descriptor kept(::dup(this->device->descriptor(SlabId{3}, true)));
  this->device = this->kind.make_next();
  EXPECT_EQ(this->device->can_adopt(), TypeParam::kOutlives);
  const Result<void> adopted = this->device->adopt_slab(SlabId{3}, kept, serial);
  if (!TypeParam::kOutlives) {
    EXPECT_EQ(adopted.error().code, Errc::system);
    return;
  }
  ASSERT_TRUE(adopted) << adopted.error().context;
  EXPECT_EQ(this->device->slab_serial(SlabId{3}), serial);
  EXPECT_EQ(this->bytes_at(SlabId{3}, 1, 1).at(0), 0x35);
  ASSERT_TRUE(this->create(SlabId{0}));
  const TranscodeJob copy = this->job(1, this->dense, this->dense, 3 * this->kSlab, 0);
  this->device->submit({&copy, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  EXPECT_EQ(this->bytes_at(SlabId{0}, 1, 1).at(0), 0x35);
}

TYPED_TEST_P(DeviceConformance, TranscodeReachesInt4AndBackAndLeavesItsSource) {
  ASSERT_TRUE(this->create(SlabId{0}));
  ASSERT_TRUE(this->create(SlabId{3}));
  const std::uint16_t value = 0x3555;
  this->fill(SlabId{0}, 16384, value);
  const TranscodeJob there = this->job(1, this->dense, this->cold, 16384, 3 * this->kSlab + 4608);
  this->device->submit({&there, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  const TranscodeJob back = this->job(2, this->cold, this->dense, 3 * this->kSlab + 4608, 32768);
  this->device->submit({&back, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  const auto there_and_back = this->bytes_at(SlabId{0}, 32768, 16384);
  EXPECT_EQ(this->bytes_at(SlabId{0}, 16384, 16384), there_and_back);
  std::uint16_t first;
  std::memcpy(&first, there_and_back.data(), 2);
  EXPECT_EQ(first, value);
}

TYPED_TEST_P(DeviceConformance, EqualFormatsCopy) {
  ASSERT_TRUE(this->create(SlabId{0}));
  ASSERT_TRUE(this->create(SlabId{1}));
  this->fill(SlabId{0}, 0, 0x1234);
  const TranscodeJob copy = this->job(1, this->dense, this->dense, 0, this->kSlab);
  this->device->submit({&copy, 1});
  ASSERT_EQ(this->finish().at(0).error.code, Errc::ok);
  EXPECT_EQ(this->bytes_at(SlabId{0}, 0, 16384), this->bytes_at(SlabId{1}, 0, 16384));
}

TYPED_TEST_P(DeviceConformance, NonFiniteValuesFailWithAReason) {
  ASSERT_TRUE(this->create(SlabId{0}));
  this->fill(SlabId{0}, 0, 0x7c00);  // infinity
  const TranscodeJob bad = this->job(9, this->dense, this->cold, 0, 32768);
  this->device->submit({&bad, 1});
  const auto done = this->finish();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, 9u);
  EXPECT_EQ(done[0].error.code, Errc::invalid_argument);
  EXPECT_STRNE(done[0].error.context, "");
}

// The sum of what was written is the sum that a check of it finds; a source that is not what its sum says is lost.
TYPED_TEST_P(DeviceConformance, ChecksumsFollowThePage) {
  ASSERT_TRUE(this->create(SlabId{0}));
  this->fill(SlabId{0}, 0, 0x3801);
  const TranscodeJob there = this->job(1, this->dense, this->cold, 0, 32768);
  this->device->submit({&there, 1});
  const auto written = this->finish();
  ASSERT_EQ(written.at(0).error.code, Errc::ok);
  TranscodeJob check{2, &this->geometry, &this->cold, nullptr, 32768, 0, written[0].checksum};
  this->device->submit({&check, 1});
  const auto same = this->finish();
  EXPECT_EQ(same.at(0).error.code, Errc::ok);
  EXPECT_EQ(same.at(0).checksum, written[0].checksum);
  check.checksum = written[0].checksum + 1;
  this->device->submit({&check, 1});
  EXPECT_EQ(this->finish().at(0).error.code, Errc::lost_page);
}

TYPED_TEST_P(DeviceConformance, EachJobIsAnsweredOnce) {
  ASSERT_TRUE(this->create(SlabId{0}));
  ASSERT_TRUE(this->create(SlabId{1}));
  std::vector<TranscodeJob> jobs;
  for (std::uint64_t i = 0; i < 9000; ++i)
    jobs.push_back(this->job(100 + i, this->dense, this->cold, 0, this->kSlab + i % 14 * 4608));
  this->device->submit(std::span(jobs).first(14));
  std::multiset<std::uint64_t> ids;
  for (const TranscodeDone& d : this->finish()) ids.insert(d.id);
  EXPECT_EQ(ids.size(), 14u);
  // More than any queue on the way holds; all read, so that they may run in any order.
  for (TranscodeJob& j : jobs) j.to = nullptr;
  this->device->submit(std::span(jobs).subspan(14));
  for (const TranscodeDone& d : this->finish()) ids.insert(d.id);
  for (std::uint64_t i = 0; i < jobs.size(); ++i) ASSERT_EQ(ids.count(100 + i), 1u);
  EXPECT_EQ(ids.size(), jobs.size());
  EXPECT_EQ(this->device->in_flight(), 0u);
}

TYPED_TEST_P(DeviceConformance, WithoutMirrorsEverythingIsPublishedAtOnce) {
  if (this->device->has_mirrors()) return;
  this->device->add_mirror(TenantId{1}, this->first_entries.data(), this->kEntries, {});
  this->publish(this->first_entries, TenantId{1}, 7, 9);
  EXPECT_EQ(this->device->mirror_descriptor(TenantId{1}), -1);
  EXPECT_EQ(this->device->published(), this->device->publications());
}

TYPED_TEST_P(DeviceConformance, MirrorsShowTheirDirectories) {
  if (!this->device->has_mirrors()) return;
  this->device->add_mirror(TenantId{1}, this->first_entries.data(), this->kEntries, {});
  this->device->add_mirror(TenantId{2}, this->second_entries.data(), this->kEntries, {});
  this->publish(this->second_entries, TenantId{2}, 17, 4);
  ASSERT_TRUE(this->await_mirror(TenantId{1}));
  ASSERT_TRUE(this->await_mirror(TenantId{2}));
  const auto first = this->mirror(TenantId{1}), second = this->mirror(TenantId{2});
  for (std::uint32_t i = 0; i < this->kEntries; ++i) {
    ASSERT_EQ(first[i], this->first_entries[i].load());
    ASSERT_EQ(second[i], this->second_entries[i].load());
  }
}

TYPED_TEST_P(DeviceConformance, WhatIsPublishedIsVisible) {
  if (!this->device->has_mirrors()) return;
  this->device->add_mirror(TenantId{1}, this->first_entries.data(), this->kEntries, {});
  ASSERT_TRUE(this->await_mirror(TenantId{1}));
  typename TypeParam::Bytes bytes(this->device->mirror_descriptor(TenantId{1}), this->mirror_bytes(), false);
  ASSERT_TRUE(bytes.ok());
  for (std::uint64_t value = 1; value <= 200; ++value) {
    const std::uint32_t page = static_cast<std::uint32_t>(value * 37 % this->kEntries);
    for (std::uint64_t older = 5; older > 0; --older)
      this->publish(this->first_entries, TenantId{1}, page, value * 10 - older);
    this->publish(this->first_entries, TenantId{1}, page, value * 10);
    const std::uint64_t wanted = this->device->publications();
    ASSERT_TRUE(this->until([&] { return this->device->published() >= wanted; }));
    std::uint64_t seen = 0;
    bytes.read(page * sizeof(seen), &seen, sizeof(seen));
    ASSERT_EQ(seen, value * 10);
  }
}

TYPED_TEST_P(DeviceConformance, NextDeviceBringsAMirrorToItsDirectory) {
  if (!this->device->has_mirrors()) return;
  this->device->add_mirror(TenantId{1}, this->first_entries.data(), this->kEntries, {});
  ASSERT_TRUE(this->await_mirror(TenantId{1}));
  Descriptor kept(::dup(this->device->mirror_descriptor(TenantId{1})));
  typename TypeParam::Bytes importer(kept.get(), this->mirror_bytes(), false);
  this->device.reset();
  this->first_entries[4999] = 12;  // what the old one had no time for
  this->device = this->kind.make_next();
  this->device->add_mirror(TenantId{1}, this->first_entries.data(), this->kEntries, std::move(kept));
  if (!TypeParam::kOutlives) {
    EXPECT_TRUE(this->until([&] {
      return this->device->health().text.find("mirror 1 could not be adopted") != std::string::npos;
    })) << this->device->health().text;
    return;
  }
  EXPECT_GE(this->device->mirror_descriptor(TenantId{1}), 0) << "importers have it already";
  this->publish(this->first_entries, TenantId{1}, 3, 33);
  EXPECT_LT(this->device->published(), this->device->publications());
  ASSERT_TRUE(this->await_mirror(TenantId{1}));
  std::vector<std::uint64_t> seen(this->kEntries);
  importer.read(0, seen.data(), this->kEntries * sizeof(std::uint64_t));
  for (std::uint32_t i = 0; i < this->kEntries; ++i) ASSERT_EQ(seen[i], this->first_entries[i].load());
}

REGISTER_TYPED_TEST_SUITE_P(DeviceConformance, NewSlabIsZeroAlsoWhenItsPlaceWasUsedBefore,
                            AllSlabsOfTheArenaCanBeHadAgainAndAgain, ReadOnlyDescriptorCannotBeMappedWritable,
                            ImporterCannotTruncateASlab, ImportersMappingOutlivesTheSlab,
                            SerialsNameTheMemoryNotThePlace, NextDeviceAdoptsASlabWithItsContentAndSerial,
                            TranscodeReachesInt4AndBackAndLeavesItsSource, EqualFormatsCopy,
                            NonFiniteValuesFailWithAReason, ChecksumsFollowThePage, EachJobIsAnsweredOnce,
                            WithoutMirrorsEverythingIsPublishedAtOnce, MirrorsShowTheirDirectories,
                            WhatIsPublishedIsVisible, NextDeviceBringsAMirrorToItsDirectory);

}  // namespace kvq::testing

// What holds of a backend's memory whichever way it is passed on, and what each way promises beyond that.
//
// Invariant: the backend is another process's, since a legacy handle does not open in its own.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "tests/gpu/device_code.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/one_backend.h"

namespace kvq::test {
namespace {

using cuda::Access;
using gpu::Exporter;

constexpr std::uint32_t kPlaces = 4, kEntries = 1000;

Exporter exporter_of(const std::string& text) {
  return text == gpu::name(Exporter::legacy) ? Exporter::legacy : Exporter::vmm;
}

ModelGeometry one_layer() {
  ModelGeometry g;
  g.layers = 1;
  g.layer[0] = {1, 64, Dtype::fp16, 0};
  return g;
}

// Arguments: channel, exporter. Slabs 0 and 1 and a mirror, sent; then does as it is told until its input ends.
KVQ_ROLE(Maker) {
  const Channel channel(arguments.at(0));
  const auto backend = open_backend(exporter_of(arguments.at(1)));
  (void)KVQ_MUST(backend->reserve(kSlabBytes, kPlaces));
  backend->add_model(0, one_layer());
  const auto make = [&](std::uint32_t slab) {
    const auto memory = KVQ_MUST(backend->make_slab());
    if (memory->index != gpu::kAnySlab && memory->index != slab) return false;
    (void)KVQ_MUST(backend->place_slab(SlabId{slab}, memory->serial));
    channel.send(memory->exported.get(), memory->serial);
    return true;
  };
  if (!make(0) || !make(1)) return 2;
  const auto mirror = KVQ_MUST(backend->make_mirror(TenantId{4}, kEntries));
  std::vector<gpu::EntryWrite> writes;
  for (std::uint32_t page = 0; page < kEntries; ++page) writes.push_back({page + 1, 4, page, page * 3ull + 1});
  (void)KVQ_MUST(backend->write_entries(writes));
  while (backend->written() < kEntries) std::this_thread::yield();
  channel.send(mirror->get());
  for (std::string told = hear(); !told.empty(); told = hear()) {
    if (told == "copy") {  // the first page of slab 0 to slab 1
      gpu::Job job;
      job.from = job.to = Format::dense;
      job.destination_bytes = kSlabBytes;
      std::vector<gpu::JobDone> done;
      (void)KVQ_MUST(backend->submit({&job, 1}));
      Result<bool> busy = true;
      while (busy && *busy) busy = backend->poll(done);
      say(std::to_string(done.size()) + " " + std::to_string(static_cast<int>(done.at(0).code)));
    } else if (told == "again") {  // slab 0
      backend->release_slab(SlabId{0});
      say(make(0) ? "made" : "another place");
    }
  }
  return 0;
}

// Arguments: channel, exporter. Is offered a slab and a mirror of an earlier backend.
KVQ_ROLE(Heir) {
  const Channel channel(arguments.at(0));
  Descriptor slab = channel.receive(), mirror = channel.receive();
  const auto backend = open_backend(exporter_of(arguments.at(1)));
  (void)KVQ_MUST(backend->reserve(kSlabBytes, kPlaces));
  int opened = 0;
  if (cuda::is_legacy_file(slab.get())) {
    const auto part = KVQ_MUST(cuda::read_legacy_file(slab.get()));
    opened = static_cast<int>(cuda::LegacyImport::open(part->handle).error().code);
  }
  const Result<void> first = backend->adopt_slab(SlabId{0}, 1, std::move(slab));
  const Result<void> second = backend->adopt_mirror(TenantId{4}, kEntries, std::move(mirror));
  say(std::to_string(static_cast<int>(first.error().code)) + " " +
      std::to_string(static_cast<int>(second.error().code)) + " " + std::to_string(opened));
  return 0;
}

class EachExporter : public ::testing::TestWithParam<Exporter> {
 protected:
  std::string name() const { return gpu::name(GetParam()); }
  bool legacy() const { return GetParam() == Exporter::legacy; }

  Channel channel;
  RoleProcess maker{"Maker", {channel.far_end(), name()}};
  std::uint64_t serial = 0;
  Descriptor first = channel.receive(&serial), second = channel.receive(), mirror = channel.receive();
};

TEST_P(EachExporter, OthersSeeAndWriteWhatTheBackendSees) {
  const Imported source(first.get(), kSlabBytes, Access::read_write);
  const Imported target(second.get(), kSlabBytes, Access::read_only);
  std::uint64_t wrong = 1;
  ASSERT_EQ(count_nonzero(source.base(), kSlabBytes, wrong), 0);
  EXPECT_EQ(wrong, 0u);
  ASSERT_EQ(fill(source.base(), kSlabBytes, 7), 0);
  maker.say("copy");
  EXPECT_EQ(maker.hear(), "1 0");
  const std::uint64_t page = make_layout(one_layer(), Format::dense).page_bytes;
  ASSERT_EQ(count_wrong(target.base(), page, 7, wrong), 0);
  EXPECT_EQ(wrong, 0u);
  ASSERT_EQ(count_nonzero(target.base() + page, kSlabBytes - page, wrong), 0);
  EXPECT_EQ(wrong, 0u);
  if (legacy()) {
    EXPECT_EQ(target.base() - source.base(), kSlabBytes) << "one allocation";
  }
  const Imported words(mirror.get(), backend().hello().granularity, Access::read_only);
  const std::vector<std::byte> seen = download(words.base(), kEntries * 8);
  for (std::uint64_t i = 0; i < kEntries; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, seen.data() + 8 * i, 8);
    ASSERT_EQ(word, i * 3 + 1);
  }
}

TEST_P(EachExporter, ANewSlabInAnOldPlaceIsZeroAndHasAnotherSerial) {
  {
    const Imported old(first.get(), kSlabBytes, Access::read_write);
    ASSERT_EQ(fill(old.base(), kSlabBytes, 0xabababab), 0);
  }
  maker.say("again");
  std::uint64_t next_serial = 0, nonzero = 1;
  const Descriptor next = channel.receive(&next_serial);
  EXPECT_EQ(maker.hear(), "made");
  EXPECT_NE(next_serial, serial);
  const Imported slab(next.get(), kSlabBytes, Access::read_only);
  ASSERT_EQ(count_nonzero(slab.base(), kSlabBytes, nonzero), 0);
  EXPECT_EQ(nonzero, 0u);
}

// Whoever has it open keeps it. A new worker adopts it by a descriptor, and is refused a handle.
TEST_P(EachExporter, AfterItsMakersDeath) {
  const Imported slab(first.get(), kSlabBytes, Access::read_write);
  ASSERT_EQ(fill(slab.base(), kSlabBytes, 11), 0);
  EXPECT_EQ(maker.kill(), -SIGKILL);
  std::uint64_t wrong = 1;
  ASSERT_EQ(count_wrong(slab.base(), kSlabBytes, 11, wrong), 0);
  EXPECT_EQ(wrong, 0u);
  const Channel to_heir;
  RoleProcess heir("Heir", {to_heir.far_end(), name()});
  to_heir.send(first.get());
  to_heir.send(mirror.get());
  EXPECT_EQ(heir.hear(), legacy() ? "7 7 13" : "0 0 0");  // stale_id, and no process opens the handle any more
  EXPECT_EQ(heir.wait(), 0);
}

INSTANTIATE_TEST_SUITE_P(Of, EachExporter, ::testing::Values(Exporter::vmm, Exporter::legacy),
                         [](const auto& info) { return gpu::name(info.param); });

KVQ_ROLE(PlaceChecker) {  // exit code: the line that failed
  const auto backend = open_backend(Exporter::legacy);
  (void)KVQ_MUST(backend->reserve(kSlabBytes, 3));
  std::vector<gpu::NewMemory> spares;
  for (std::uint32_t i = 0; i < 3; ++i) {
    spares.push_back(std::move(*KVQ_MUST(backend->make_slab())));
    if (spares.back().index != i || spares.back().serial == 0) return __LINE__ % 256;
  }
  const auto refuses = [&](std::uint32_t slab, std::uint64_t serial) {
    return backend->place_slab(SlabId{slab}, serial).error().code == Errc::invalid_argument;
  };
  if (backend->make_slab().error().code != Errc::no_memory) return __LINE__ % 256;
  if (!refuses(1, spares[0].serial) || !refuses(3, spares[0].serial) || !refuses(0, 0)) return __LINE__ % 256;
  if (!backend->place_slab(SlabId{0}, spares[0].serial) || !refuses(0, spares[1].serial)) return __LINE__ % 256;
  if (backend->make_slab().error().code != Errc::no_memory) return __LINE__ % 256;
  backend->release_slab(SlabId{0});
  const auto again = KVQ_MUST(backend->make_slab());
  if (again->index != 0 || !refuses(0, spares[0].serial)) return __LINE__ % 256;
  return backend->place_slab(SlabId{0}, again->serial) ? 0 : __LINE__ % 256;
}

TEST(LegacyPlaces, AreCheckedByNumberAndSerial) { EXPECT_EQ(RoleProcess("PlaceChecker").wait(), 0); }

KVQ_ROLE(LegacyGlutton) {  // asks for more places than the GPU has room for
  const auto backend = open_backend(Exporter::legacy);
  (void)KVQ_MUST(backend->reserve(1ull << 30, 4096));
  std::uint64_t made = 0;
  for (;; ++made) {
    const auto memory = backend->make_slab();
    if (!memory && memory.error().code != Errc::no_memory) die(memory.error(), __FILE__, __LINE__);
    if (!memory) break;
  }
  const bool room = static_cast<bool>(backend->make_mirror(TenantId{1}, 1'000'000));
  say(std::to_string(made) + (room ? " and a mirror" : " and no mirror"));
  return 0;
}

TEST(LegacyPlaces, AreAsManyAsFitButOne) {
  const std::uint64_t free_gib = free_bytes() >> 30;
  RoleProcess glutton("LegacyGlutton");
  const std::string said = glutton.hear();
  EXPECT_EQ(glutton.wait(), 0);
  EXPECT_NE(said.find(" and a mirror"), std::string::npos) << said;
  EXPECT_GE(std::stoull(said) + 4, free_gib) << said;
  EXPECT_LT(std::stoull(said), free_gib) << said;
}

}  // namespace
}  // namespace kvq::test

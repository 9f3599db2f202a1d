// The CUDA backend's memory: slabs and mirrors, across processes and deaths.
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

KVQ_ROLE(Dirtier) {  // dirties as much of the GPU as it is told, and gives it back
  const auto backend = open_backend();
  const std::uint64_t bytes = std::stoull(arguments.at(0));
  (void)KVQ_MUST(backend->reserve(kSlabBytes, 1));
  std::vector<gpu::NewMemory> slabs;
  for (std::uint64_t made = 0; made < bytes; made += kSlabBytes) {
    slabs.push_back(std::move(*KVQ_MUST(backend->make_slab())));
    const Imported slab(slabs.back().exported.get(), kSlabBytes, Access::read_write);
    if (fill(slab.base(), kSlabBytes, 0xabababab) != 0) return 1;
  }
  say("dirty");
  return 0;
}

TEST(Slab, IsZeroThoughAnotherProcessUsedTheMemoryBefore) {
  const std::uint64_t bytes = std::min<std::uint64_t>(free_bytes() / 2, 64ull << 30);
  RoleProcess dirtier("Dirtier", {std::to_string(bytes)});
  ASSERT_EQ(dirtier.hear(), "dirty");
  ASSERT_EQ(dirtier.wait(), 0);
  std::vector<gpu::NewMemory> slabs;
  for (std::uint64_t made = 0; made < bytes; made += kSlabBytes) {
    slabs.push_back(std::move(*KVQ_MUST(backend().make_slab())));
    const Imported slab(slabs.back().exported.get(), kSlabBytes, Access::read_only);
    std::uint64_t nonzero = 1;
    ASSERT_EQ(count_nonzero(slab.base(), kSlabBytes, nonzero), 0);
    ASSERT_EQ(nonzero, 0u) << "slab " << slabs.size();
  }
  for (const gpu::NewMemory& slab : slabs) drop_spare(slab.serial);
}

TEST(Slab, IsZeroThoughThisProcessUsedTheMemoryBefore) {
  for (int round = 0; round < 8; ++round) {
    const Placed slab(3);
    std::uint64_t nonzero = 1;
    ASSERT_EQ(count_nonzero(slab.window.base(), kSlabBytes, nonzero), 0);
    ASSERT_EQ(nonzero, 0u) << "round " << round;
    ASSERT_EQ(fill(slab.window.base(), kSlabBytes, 0xabababab), 0);
  }
}

KVQ_ROLE(Reader) {  // maps a slab as it is told, checks it, writes to it
  const Channel channel(arguments.at(0));
  const bool read_only = arguments.at(1) == "read-only";
  const Descriptor file = channel.receive();
  const Imported slab(file.get(), kSlabBytes, read_only ? Access::read_only : Access::read_write);
  std::uint64_t wrong = 1;
  if (count_wrong(slab.base(), kSlabBytes, 7, wrong) != 0 || wrong != 0) return 1;
  say(std::to_string(write_word(slab.base() + 64, 0x600d)));
  return 0;
}

std::uint32_t word_at_64(const Placed& slab) {
  std::uint32_t word = 0;
  std::memcpy(&word, download(slab.window.base() + 64, 4).data(), 4);
  return word;
}

TEST(Slab, AnotherProcessReadsAndWritesItByItsDescriptor) {
  const Placed slab(5);
  ASSERT_EQ(fill(slab.window.base(), kSlabBytes, 7), 0);
  const Channel channel;
  RoleProcess reader("Reader", {channel.far_end(), "read-write"});
  channel.send(slab.memory.exported.get());
  EXPECT_EQ(reader.hear(), "0");
  EXPECT_EQ(reader.wait(), 0);
  EXPECT_EQ(word_at_64(slab), 0x600du);
}

TEST(Slab, WriteThroughAReadOnlyMappingFaultsInTheWriterAlone) {
  const Placed slab(5);
  ASSERT_EQ(fill(slab.window.base(), kSlabBytes, 7), 0);
  const Channel channel;
  RoleProcess reader("Reader", {channel.far_end(), "read-only"});
  channel.send(slab.memory.exported.get());
  const int code = std::stoi(reader.hear());
  EXPECT_TRUE(cuda::is_context_lost(code)) << code;
  reader.wait();
  EXPECT_EQ(word_at_64(slab), 7u + 16);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

KVQ_ROLE(MortalWorker) {  // makes a slab and a mirror, writes both, sends them, and waits for its death
  const Channel channel(arguments.at(0));
  const auto backend = open_backend();
  (void)KVQ_MUST(backend->reserve(kSlabBytes, 4));
  const auto memory = KVQ_MUST(backend->make_slab());
  (void)KVQ_MUST(backend->place_slab(SlabId{2}, memory->serial));
  const Imported slab(memory->exported.get(), kSlabBytes, Access::read_write);
  if (fill(slab.base(), kSlabBytes, 11) != 0) return 1;
  const auto mirror = KVQ_MUST(backend->make_mirror(TenantId{4}, 1000));
  std::vector<gpu::EntryWrite> writes;
  for (std::uint32_t page = 0; page < 1000; ++page) writes.push_back({page + 1, 4, page, page * 3ull + 1});
  (void)KVQ_MUST(backend->write_entries(writes));
  while (backend->written() < 1000) std::this_thread::yield();
  channel.send(memory->exported.get(), memory->serial);
  channel.send(mirror->get());
  hear();
  return 0;
}

TEST(Memory, OutlivesTheWorkerThatMadeItWhileADescriptorIsHeld) {
  const Channel channel;
  RoleProcess worker("MortalWorker", {channel.far_end()});
  std::uint64_t serial = 0;
  Descriptor slab = channel.receive(&serial);
  Descriptor mirror = channel.receive();
  EXPECT_EQ(worker.kill(), -SIGKILL);

  const Imported slab_window(slab.get(), kSlabBytes, Access::read_only);
  const Imported mirror_window(mirror.get(), backend().hello().granularity, Access::read_only);
  ASSERT_TRUE(backend().adopt_slab(SlabId{9}, serial, std::move(slab)));
  ASSERT_TRUE(backend().adopt_mirror(TenantId{77}, 1000, std::move(mirror)));
  std::uint64_t wrong = 1;
  ASSERT_EQ(count_wrong(slab_window.base(), kSlabBytes, 11, wrong), 0);
  EXPECT_EQ(wrong, 0u);
  const gpu::EntryWrite again{++last_sequence(), 77, 999, 42};
  ASSERT_TRUE(backend().write_entries({&again, 1}));
  wait_written(last_sequence());
  const std::vector<std::byte> words = download(mirror_window.base(), 8000);
  std::uint64_t word;
  for (std::uint64_t page = 0; page < 1000; ++page) {
    std::memcpy(&word, words.data() + 8 * page, 8);
    ASSERT_EQ(word, page == 999 ? 42 : page * 3 + 1);
  }
  backend().release_slab(SlabId{9});
}

KVQ_ROLE(LastImporter) {  // maps a slab, waits until nobody else has it, then checks it
  const Channel channel(arguments.at(0));
  const bool keeps_handle = arguments.at(1) == "handle", keeps_file = arguments.at(1) == "file";
  Descriptor file = channel.receive();
  if (cudaFree(nullptr) != cudaSuccess) return 1;
  Result<cuda::Physical> memory = KVQ_MUST(cuda::Physical::import(file.get()));
  const auto range = KVQ_MUST(cuda::AddressRange::reserve(0, kSlabBytes));
  const auto mapping = KVQ_MUST(range->map(0, kSlabBytes, *memory, Access::read_only));
  if (!keeps_handle) *memory = cuda::Physical();
  if (!keeps_file) Descriptor(std::move(file));
  say("mapped");
  hear();
  std::uint64_t wrong = 1;
  const int code = count_wrong(mapping->base(), kSlabBytes, 7, wrong);
  say(std::to_string(code) + " " + std::to_string(wrong));
  ::_exit(0);
}

TEST(Memory, OutlivesItsMakersReleaseWhileAnImporterMapsIt) {
  for (const char* keeps : {"handle", "file", "mapping"}) {
    const Channel channel;
    RoleProcess importer("LastImporter", {channel.far_end(), keeps});
    {
      const Placed slab(5);
      ASSERT_EQ(fill(slab.window.base(), kSlabBytes, 7), 0);
      channel.send(slab.memory.exported.get());
      ASSERT_EQ(importer.hear(), "mapped");
    }
    const Placed next(5);  // takes the memory if it is free
    ASSERT_EQ(fill(next.window.base(), kSlabBytes, 1), 0);
    importer.say("go");
    EXPECT_EQ(importer.hear(), "0 0") << keeps;
    importer.wait();
  }
}

TEST(Slab, GivesItsBytesBackWhenItIsReleased) {
  const std::uint64_t before = free_bytes();
  {
    const Placed slab(1);
    EXPECT_LE(free_bytes(), before - kSlabBytes);
  }
  EXPECT_EQ(free_bytes(), before);
}

TEST(Slab, PlacesAreCheckedByNumberAndSerial) {
  const Placed slab(6);
  const auto spare = KVQ_MUST(backend().make_slab());
  EXPECT_NE(spare->serial, 0u);
  EXPECT_NE(spare->serial, slab.memory.serial);
  EXPECT_EQ(backend().place_slab(SlabId{7}, spare->serial + 1).error().code, Errc::invalid_argument);
  EXPECT_EQ(backend().place_slab(SlabId{6}, spare->serial).error().code, Errc::invalid_argument);
  EXPECT_EQ(backend().place_slab(SlabId{kSlabs}, spare->serial).error().code, Errc::invalid_argument);
  EXPECT_EQ(backend().adopt_slab(SlabId{7}, 1, Descriptor(::dup(0))).error().code, Errc::system);
  EXPECT_TRUE(backend().place_slab(SlabId{7}, spare->serial));
  EXPECT_EQ(backend().place_slab(SlabId{8}, spare->serial).error().code, Errc::invalid_argument);
  backend().release_slab(SlabId{7});
}

KVQ_ROLE(Doomed) {  // breaks its context, and says what the backend makes of it
  const auto backend = open_backend();
  (void)KVQ_MUST(backend->reserve(kSlabBytes, 2));
  const auto memory = KVQ_MUST(backend->make_slab());
  (void)KVQ_MUST(backend->place_slab(SlabId{0}, memory->serial));
  const Descriptor mirror = std::move(*KVQ_MUST(backend->make_mirror(TenantId{1}, 10)));
  ModelGeometry g;
  g.layers = 1;
  g.layer[0] = {1, 64, Dtype::fp16, 0};
  backend->add_model(0, g);
  const Imported slab(memory->exported.get(), kSlabBytes, Access::read_only);
  if (write_word(slab.base(), 1) == 0) return 1;
  gpu::Job job;
  job.from = Format::dense;
  std::vector<gpu::JobDone> done;
  if (!backend->submit({&job, 1})) return 2;
  Result<bool> busy = true;
  while (busy && *busy) busy = backend->poll(done);
  const gpu::EntryWrite write{1, 1, 1, 1};
  const Result<void> written = backend->write_entries({&write, 1});
  say(std::to_string(static_cast<int>(busy.error().code)) + " " +
      std::to_string(static_cast<int>(written.error().code)) + " " + std::to_string(done.size()));
  ::_exit(0);
}

TEST(Context, ThatIsLostIsCalledLostByEveryCall) {
  RoleProcess doomed("Doomed");
  EXPECT_EQ(doomed.hear(), "15 15 0");
  EXPECT_EQ(doomed.wait(), 0);
  const Placed slab(3);  // nobody else is hurt
  EXPECT_EQ(fill(slab.window.base(), kSlabBytes, 1), 0);
}

TEST(Context, HelloNamesTheGpuAndAWrongNameIsAnsweredWithTheRightOnes) {
  const gpu::Hello hello = backend().hello();
  const auto found = KVQ_MUST(cuda::find_gpu(hello.uuid));
  EXPECT_EQ(found->name, hello.name);
  EXPECT_EQ(found->total_bytes, hello.total_bytes);
  EXPECT_STREQ(hello.device, "cuda");
  EXPECT_GT(hello.free_bytes, 0u);
  EXPECT_EQ(kSlabBytes % hello.granularity, 0u);
  std::string why_not;
  EXPECT_EQ(gpu::open_cuda("GPU-of-another-machine", {}, why_not).error().code, Errc::system);
  EXPECT_NE(why_not.find("GPU-of-another-machine"), std::string::npos) << why_not;
  EXPECT_NE(why_not.find(hello.uuid), std::string::npos) << why_not;
}

KVQ_ROLE(Glutton) {  // takes slabs until there are no more
  const auto backend = open_backend();
  constexpr std::uint64_t kGiB = 1ull << 30;
  (void)KVQ_MUST(backend->reserve(kGiB, 1024));
  std::vector<gpu::NewMemory> slabs;
  for (;;) {
    auto memory = backend->make_slab();
    if (!memory) {
      if (memory.error().code != Errc::no_memory) die(memory.error(), __FILE__, __LINE__);
      break;
    }
    if (!backend->place_slab(SlabId{static_cast<std::uint32_t>(slabs.size())}, memory->serial)) return 1;
    slabs.push_back(std::move(*memory));
  }
  say(std::to_string(slabs.size()));
  if (backend->make_slab()) return 2;  // still full
  slabs.pop_back();
  backend->release_slab(SlabId{static_cast<std::uint32_t>(slabs.size())});
  return backend->make_slab() ? 0 : 3;
}

TEST(Slab, AsManyAsFitAreMadeThenThereIsNoMemory) {
  const std::uint64_t free_gib = free_bytes() >> 30;
  RoleProcess glutton("Glutton");
  const std::uint64_t made = std::stoull(glutton.hear());
  EXPECT_EQ(glutton.wait(), 0);
  EXPECT_GE(made + 3, free_gib);  // but for its own context
  EXPECT_LE(made, free_gib);
  report("slabs_of_1_gib_that_fit", std::to_string(free_gib) + " GiB free", static_cast<double>(made), "slabs");
}

KVQ_ROLE(Watcher) {  // a kernel that looks at one entry of a mirror without end
  const Channel channel(arguments.at(0));
  const Descriptor file = channel.receive();
  const Imported mirror(file.get(), std::stoull(arguments.at(1)), Access::read_only);
  volatile std::uint64_t* started = nullptr;
  if (cudaMallocHost(const_cast<std::uint64_t**>(&started), 8) != cudaSuccess) return 1;
  *started = 0;
  std::thread herald([started] {
    while (*started == 0) std::this_thread::yield();
    say("watching");
  });
  Seen seen;
  const int code = watch(mirror.base() + 8 * 123, std::stoull(arguments.at(2)), started, seen);
  *started = 1;
  herald.join();
  say(std::to_string(code) + " " + std::to_string(seen.last) + " " + std::to_string(seen.changes) + " " +
      std::to_string(seen.steps_back));
  return 0;
}

TEST(Mirror, RunningKernelOfAnotherProcessSeesTheValuesOfAnEntryInOrder) {
  constexpr std::uint64_t kLast = 2000;
  const Descriptor file = std::move(*KVQ_MUST(backend().make_mirror(TenantId{1}, 4096)));
  const Channel channel;
  RoleProcess watcher("Watcher",
                      {channel.far_end(), std::to_string(backend().hello().granularity), std::to_string(kLast)});
  channel.send(file.get());
  ASSERT_EQ(watcher.hear(), "watching");
  const double begin = now_ms();
  for (std::uint64_t value = 1; value <= kLast; ++value) {
    const gpu::EntryWrite write{++last_sequence(), 1, 123, value};
    ASSERT_TRUE(backend().write_entries({&write, 1}));
  }
  wait_written(last_sequence());
  const double took = now_ms() - begin;
  int code = -1;
  unsigned long long last = 0, changes = 0, back = 1;
  ASSERT_EQ(std::sscanf(watcher.hear().c_str(), "%d %llu %llu %llu", &code, &last, &changes, &back), 4);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(last, kLast);
  EXPECT_EQ(back, 0u);
  EXPECT_GE(changes, 1u);
  report("entries_seen_by_a_running_kernel", "2000 writes", static_cast<double>(changes), "values");
  report("entries_written_beside_a_spinning_process", "2000 writes", took * 1e3, "us");
}

TEST(Mirror, HasEveryEntryOnceItsSequenceIsWritten) {
  constexpr std::uint32_t kEntries = 1'000'000;
  const Descriptor file = std::move(*KVQ_MUST(backend().make_mirror(TenantId{2}, kEntries)));
  const Imported window(file.get(), round_up(8ull * kEntries, backend().hello().granularity), Access::read_only);
  std::vector<gpu::EntryWrite> writes;
  const double begin = now_ms();
  for (std::uint32_t page = 0; page < kEntries; page += 4096) {
    writes.clear();
    for (std::uint32_t i = page; i < std::min(page + 4096, kEntries); ++i)
      writes.push_back({++last_sequence(), 2, i, i + 5ull});
    ASSERT_TRUE(backend().write_entries(writes));
  }
  wait_written(last_sequence());
  report("mirror_filled", "1000000 entries in order", (now_ms() - begin) * 1e3, "us");
  writes.clear();
  const double scattered = now_ms();
  for (std::uint32_t i = 0; i < 20'000; ++i) writes.push_back({++last_sequence(), 2, i * 49 % kEntries, i + 7ull});
  ASSERT_TRUE(backend().write_entries(writes));
  wait_written(last_sequence());
  report("mirror_written", "20000 scattered entries", (now_ms() - scattered) * 1e3, "us");
  const std::vector<std::byte> words = download(window.base(), 8ull * kEntries);
  for (std::uint32_t page = 0; page < kEntries; ++page) {
    std::uint64_t word;
    std::memcpy(&word, words.data() + 8ull * page, 8);
    ASSERT_EQ(word, page % 49 == 0 && page / 49 < 20'000 ? page / 49 + 7ull : page + 5ull) << page;
  }
}

TEST(Mirror, EntryWithoutAPlaceIsRefusedAndNothingOfItsCallIsWritten) {
  const Descriptor file = std::move(*KVQ_MUST(backend().make_mirror(TenantId{3}, 10)));
  const Imported window(file.get(), backend().hello().granularity, Access::read_only);
  const gpu::EntryWrite writes[] = {{last_sequence() + 1, 3, 1, 99}, {last_sequence() + 2, 3, 10, 99}};
  EXPECT_EQ(backend().write_entries(writes).error().code, Errc::invalid_argument);
  const gpu::EntryWrite nowhere[] = {{last_sequence() + 1, 3, 1, 99}, {last_sequence() + 2, 12345, 0, 99}};
  EXPECT_EQ(backend().write_entries(nowhere).error().code, Errc::invalid_argument);
  const gpu::EntryWrite good{++last_sequence(), 3, 2, 98};
  ASSERT_TRUE(backend().write_entries({&good, 1}));
  wait_written(last_sequence());
  std::uint64_t words[3];
  std::memcpy(words, download(window.base(), sizeof words).data(), sizeof words);
  EXPECT_EQ(words[1], 0u);
  EXPECT_EQ(words[2], 98u);
}

TEST(Mirror, OfANewTenantWithAnOldNumberTakesTheOldOnesPlace) {
  const Descriptor old = std::move(*KVQ_MUST(backend().make_mirror(TenantId{5}, 10)));
  const gpu::EntryWrite before{++last_sequence(), 5, 1, 11};
  ASSERT_TRUE(backend().write_entries({&before, 1}));  // may still be on its way below
  const Descriptor file = std::move(*KVQ_MUST(backend().make_mirror(TenantId{5}, 10)));
  const gpu::EntryWrite after{++last_sequence(), 5, 2, 12};
  ASSERT_TRUE(backend().write_entries({&after, 1}));
  wait_written(last_sequence());
  const std::uint64_t bytes = backend().hello().granularity;
  const Imported old_window(old.get(), bytes, Access::read_only), window(file.get(), bytes, Access::read_only);
  const std::vector<std::uint64_t> want_old = {0, 11, 0}, want = {0, 0, 12};
  EXPECT_EQ(std::memcmp(download(old_window.base(), 24).data(), want_old.data(), 24), 0);
  EXPECT_EQ(std::memcmp(download(window.base(), 24).data(), want.data(), 24), 0);
}

}  // namespace
}  // namespace kvq::test

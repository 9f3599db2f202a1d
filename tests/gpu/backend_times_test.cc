// What the pieces of the CUDA device cost: an arena of 120 GB, a worker's context, batches of jobs. Rows of the topic
// "device".
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/gpu/device_code.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/one_backend.h"

namespace kvq::test {
namespace {

constexpr std::uint64_t kBigSlab = 256ull << 20;

std::string shape(std::uint64_t slabs) { return std::to_string(slabs) + " slabs of 256 MiB"; }

KVQ_ROLE(BigWorker) {  // makes and places slabs, says the times, gives the descriptors
  const Channel channel(arguments.at(0));
  const std::uint32_t slabs = static_cast<std::uint32_t>(std::stoul(arguments.at(1)));
  const double start = now_ms();
  const auto backend = open_backend();
  const double opened = now_ms();
  (void)KVQ_MUST(backend->reserve(kBigSlab, slabs));
  std::vector<gpu::NewMemory> made;
  for (std::uint32_t i = 0; i < slabs; ++i) made.push_back(std::move(*KVQ_MUST(backend->make_slab())));
  const double created = now_ms();
  for (std::uint32_t i = 0; i < slabs; ++i) (void)KVQ_MUST(backend->place_slab(SlabId{i}, made[i].serial));
  const double placed = now_ms();
  say(std::to_string(opened - start) + " " + std::to_string(created - opened) + " " + std::to_string(placed - created) +
      " " + std::to_string(backend->hello().overhead_bytes >> 20));
  for (const gpu::NewMemory& memory : made) {
    channel.send(memory.exported.get(), memory.serial);
    hear();
  }
  hear();
  return 0;
}

KVQ_ROLE(Adopter) {  // adopts slabs as a worker after a restart does
  const Channel channel(arguments.at(0));
  const std::uint32_t slabs = static_cast<std::uint32_t>(std::stoul(arguments.at(1)));
  std::vector<Descriptor> files;
  for (std::uint32_t i = 0; i < slabs; ++i) {
    files.push_back(channel.receive());
    say("next");
  }
  const double start = now_ms();
  const auto backend = open_backend();
  const double opened = now_ms();
  (void)KVQ_MUST(backend->reserve(kBigSlab, slabs));
  for (std::uint32_t i = 0; i < slabs; ++i) (void)KVQ_MUST(backend->adopt_slab(SlabId{i}, 1, std::move(files[i])));
  say(std::to_string(opened - start) + " " + std::to_string(now_ms() - opened));
  hear();
  return 0;
}

TEST(Times, OfAnArenaOf120Gigabytes) {
  const std::uint64_t slabs = std::min<std::uint64_t>(448, (free_bytes() - (8ull << 30)) / kBigSlab);
  const Channel channel;
  RoleProcess worker("BigWorker", {channel.far_end(), std::to_string(slabs)});
  double opened = 0, created = 0, placed = 0;
  unsigned long long overhead_mib = 0;
  ASSERT_EQ(std::sscanf(worker.hear().c_str(), "%lf %lf %lf %llu", &opened, &created, &placed, &overhead_mib), 4);
  std::vector<Descriptor> files;
  for (std::uint64_t i = 0; i < slabs; ++i) {
    files.push_back(channel.receive());
    worker.say("next");
  }
  report("worker_opens_its_gpu", "process is running", opened * 1e3, "us");
  report("slabs_created_and_exported", shape(slabs), created * 1e3, "us");
  report("slabs_placed", shape(slabs), placed * 1e3, "us");
  report("worker_overhead", "context, streams, staging", static_cast<double>(overhead_mib), "MiB");

  {
    std::vector<std::unique_ptr<Imported>> windows;
    const double begin = now_ms();
    for (const Descriptor& file : files)
      windows.push_back(std::make_unique<Imported>(file.get(), kBigSlab, cuda::Access::read_only));
    report("slabs_imported_and_mapped_by_a_client", shape(slabs), (now_ms() - begin) * 1e3, "us");
  }
  const double killed = now_ms();
  EXPECT_EQ(worker.kill(), -SIGKILL);
  report("worker_killed", shape(slabs), (now_ms() - killed) * 1e3, "us");
  const Channel next;
  RoleProcess adopter("Adopter", {next.far_end(), std::to_string(slabs)});
  for (const Descriptor& file : files) {
    next.send(file.get());
    ASSERT_EQ(adopter.hear(), "next");
  }
  double reopened = 0, adopted = 0;
  ASSERT_EQ(std::sscanf(adopter.hear().c_str(), "%lf %lf", &reopened, &adopted), 2);
  report("worker_reopens_its_gpu", "process is running", reopened * 1e3, "us");
  report("slabs_adopted", shape(slabs), adopted * 1e3, "us");
}

double median(std::vector<double>& times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// One slab made, placed and released; a worker does it between other things, so none of it may wait for what runs.
void time_slabs(const std::string& name) {
  std::vector<double> made, placed, released;
  for (int i = 0; i < 21; ++i) {
    const double begin = now_ms();
    auto memory = KVQ_MUST(backend().make_slab());
    made.push_back((now_ms() - begin) * 1e3);
    const double before_place = now_ms();
    (void)KVQ_MUST(backend().place_slab(SlabId{0}, memory->serial));
    placed.push_back((now_ms() - before_place) * 1e3);
    *memory = {};
    const double before_release = now_ms();
    backend().release_slab(SlabId{0});
    released.push_back((now_ms() - before_release) * 1e3);
  }
  report("slab_made" + name, "64 MiB", median(made), "us");
  report("slab_placed" + name, "64 MiB", median(placed), "us");
  report("slab_released" + name, "64 MiB", median(released), "us");
}

TEST(Times, OfOneSlab) { time_slabs(""); }

TEST(Times, OfOneSlabWhileAKernelRuns) {
  ASSERT_EQ(start_spinning(1000), 0);
  const double begin = now_ms();
  time_slabs("_while_a_kernel_runs");
  EXPECT_LT(now_ms() - begin, 800) << "something waited for the kernel";
  ASSERT_EQ(finish(), 0);
}

// 64 pages of an 8B model: 32 layers, 8 heads, 128 channels.
TEST(Times, OfABatchOfJobs) {
  ModelGeometry g;
  g.layers = 32;
  for (std::uint32_t i = 0; i < g.layers; ++i) g.layer[i] = {8, 128, Dtype::bf16, 0};
  backend().add_model(8, g);
  const std::uint64_t dense = make_layout(g, Format::dense).page_bytes,
                      packed = make_layout(g, Format::int4).page_bytes;
  constexpr std::uint32_t kPages = 64;
  std::vector<std::unique_ptr<Placed>> slabs;
  for (std::uint32_t i = 0; i < 13; ++i) slabs.push_back(std::make_unique<Placed>(i));
  for (std::uint32_t i = 0; i < 8; ++i) ASSERT_EQ(fill_values(slabs[i]->window.base(), kSlabBytes), 0);
  std::vector<gpu::Job> jobs;
  for (std::uint32_t page = 0; page < kPages; ++page) {
    const std::uint64_t in_source = kSlabBytes / dense, in_packed = kSlabBytes / packed;
    gpu::Job job;
    job.id = page;
    job.model = 8;
    job.from = Format::dense;
    job.to = Format::int4;
    job.source_bytes = page / in_source * kSlabBytes + page % in_source * dense;
    job.destination_bytes = (8 + page / in_packed) * kSlabBytes + page % in_packed * packed;
    jobs.push_back(job);
  }
  std::vector<double> times;
  std::vector<gpu::JobDone> done;
  for (int round = 0; round < 21; ++round) {
    done.clear();
    const double begin = now_ms();
    ASSERT_TRUE(backend().submit(jobs));
    while (*KVQ_MUST(backend().poll(done))) {
    }
    times.push_back((now_ms() - begin) * 1e3);
    ASSERT_EQ(done.size(), kPages);
    for (const gpu::JobDone& d : done) ASSERT_EQ(d.code, Errc::ok);
  }
  const double us = median(times);
  report("batch_transcoded", "64 pages of 8 MiB to int4", us, "us");
  report("batch_read", "64 pages of 8 MiB to int4", static_cast<double>(kPages * dense) / us / 1e3, "GB/s");
}

TEST(Times, OfOneEntry) {
  const Descriptor file = std::move(*KVQ_MUST(backend().make_mirror(TenantId{50}, 4096)));
  std::vector<double> times;
  for (int i = 0; i < 201; ++i) {
    const gpu::EntryWrite write{++last_sequence(), 50, 1, 1};
    const double begin = now_ms();
    (void)KVQ_MUST(backend().write_entries({&write, 1}));
    while (backend().written() < write.sequence) {
    }
    times.push_back((now_ms() - begin) * 1e3);
  }
  report("entry_written", "one alone", median(times), "us");
}

}  // namespace
}  // namespace kvq::test

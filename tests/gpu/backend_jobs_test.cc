// Jobs of the CUDA backend: each is answered once, with the host's bytes and sums, whatever else is in its batch; and a
// worker that is killed in the middle of them has hurt no page.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "kernels/host_kernels.h"
#include "kernels/logit_noise.h"
#include "kernels/page_sum.h"
#include "tests/gpu/gpu_test.h"
#include "tests/gpu/one_backend.h"
#include "tests/support/seed.h"

namespace kvq::test {
namespace {

using cuda::Access;
using gpu::Job;
using gpu::JobDone;

std::mt19937_64& random_source() {
  static std::mt19937_64 source = [] {
    const std::uint64_t seed = kvq::testing::test_seed(4);
    std::printf("KVQ_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
    return std::mt19937_64(seed);
  }();
  return source;
}

ModelGeometry geometry(std::uint32_t number) {
  ModelGeometry g;
  if (number == 0) {
    g.layers = 3;
    g.layer[0] = {2, 128, Dtype::fp16, 0};
    g.layer[1] = {2, 128, Dtype::fp16, 1};
    g.layer[2] = {2, 128, Dtype::fp16, 0};
  } else {
    g.layers = 2;
    g.layer[0] = {1, 64, Dtype::bf16, 0};
    g.layer[1] = {3, 80, Dtype::bf16, 0};
  }
  return g;
}

// A dense page of finite values of moderate size.
std::vector<std::byte> dense_page(std::uint32_t model) {
  std::vector<std::byte> page(make_layout(geometry(model), Format::dense).page_bytes);
  for (std::size_t at = 0; at + 2 <= page.size(); at += 2) {
    const std::uint64_t r = random_source()();
    const std::uint16_t exponent = static_cast<std::uint16_t>(r >> 32) % 6;
    const std::uint16_t fp16 = (r & 0x83ff) | ((13 + exponent) << 10), bf16 = (r & 0x807f) | ((123 + exponent) << 7);
    const std::uint16_t value = model == 0 ? fp16 : bf16;
    std::memcpy(page.data() + at, &value, 2);
  }
  return page;
}

std::vector<std::byte> on_host(std::uint32_t model, Format from, const std::vector<std::byte>& page, Format to) {
  const ModelGeometry g = geometry(model);
  const PageLayout out_layout = make_layout(g, to);
  std::vector<std::byte> out(out_layout.page_bytes);
  const Result<void> done = transcode_page(g, make_layout(g, from), page.data(), out_layout, out.data());
  KVQ_ASSERT(static_cast<bool>(done));
  return out;
}

float noise_on_host(std::uint32_t model, Format to, const std::vector<std::byte>& dense,
                    const std::vector<std::byte>& cold, std::uint16_t layer) {
  const ModelGeometry g = geometry(model);
  if (layer >= g.layers) return gpu::kNotMeasured;
  const PageLayout before = make_layout(g, Format::dense), after = make_layout(g, to);
  return logit_noise(g.layer[layer], before.layer[layer], dense.data() + before.layer[layer].offset_bytes,
                     after.layer[layer], cold.data() + after.layer[layer].offset_bytes);
}

std::vector<JobDone> finish(gpu::Backend& backend, double patience_ms = 20'000) {
  std::vector<JobDone> done;
  for (const double end = now_ms() + patience_ms;;) {
    const Result<bool> busy = backend.poll(done);
    if (!busy) die(busy.error(), __FILE__, __LINE__);
    if (!*busy || now_ms() > end) return done;
  }
}

// What a job must be answered with.
struct Expected {
  Errc code = Errc::ok;
  std::vector<std::byte> bytes;  // at the destination; empty: not looked at
  std::uint64_t at = 0, checksum = 0;
  float noise = gpu::kNotMeasured;
};

// Pages one after another in two slabs; the jobs that rewrite them, and what must come of them.
class Pages {
 public:
  Pages() : sources_(0), destinations_(1) {}

  void add(std::uint32_t model, Format from, Format to) {
    const std::vector<std::byte> dense = dense_page(model);
    const std::vector<std::byte> source = from == Format::dense ? dense : on_host(model, Format::dense, dense, from);
    Job job = put(model, from, to, source);
    Expected expected;
    if (from == Format::dense && to != Format::none) {
      job.measured = static_cast<std::uint16_t>(random_source()() % (geometry(model).layers + 1));  // or no such layer
      expected.noise = noise_on_host(model, to, source, on_host(model, from, source, to), job.measured);
    }
    if (to == Format::none) {
      expected.checksum = page_sum(source.data(), source.size());
    } else {
      expected.bytes = on_host(model, from, source, to);
      expected.checksum = page_sum(expected.bytes.data(), expected.bytes.size());
      expected.at = job.destination_bytes;
    }
    if (random_source()() % 2 == 0) {
      job.has_checksum = 1;
      job.checksum = page_sum(source.data(), source.size());
    }
    push(job, std::move(expected));
  }
  void add_damaged(std::uint32_t model) {
    Job job = put(model, Format::dense, Format::int4, dense_page(model));
    job.has_checksum = 1;
    job.checksum = 1;
    push(job, {Errc::lost_page});
  }
  void add_infinite(std::uint32_t model) {
    std::vector<std::byte> page = dense_page(model);
    const std::uint16_t infinity = model == 0 ? 0x7c00 : 0x7f80;
    std::memcpy(page.data(), &infinity, 2);
    push(put(model, Format::dense, Format::int4, page), {Errc::invalid_argument});
  }
  void add_wild(std::uint64_t source, std::uint64_t destination, std::uint32_t model = 0) {
    Job job;
    job.model = model;
    job.from = Format::dense;
    job.to = Format::int4;
    job.source_bytes = source;
    job.destination_bytes = destination;
    push(job, {Errc::invalid_argument});
  }

  std::vector<Job> jobs;
  std::map<std::uint64_t, Expected> expected;

  void check(const std::vector<JobDone>& done) const {
    std::map<std::uint64_t, int> answers;
    const std::vector<std::byte> memory = download(destinations_.window.base(), destination_at_);
    for (const JobDone& d : done) {
      ASSERT_EQ(++answers[d.id], 1) << "job " << d.id;
      const Expected& e = expected.at(d.id);
      ASSERT_EQ(d.code, e.code) << "job " << d.id;
      if (e.code != Errc::ok) continue;
      ASSERT_EQ(d.checksum, e.checksum) << "job " << d.id;
      ASSERT_EQ(d.noise, e.noise) << "job " << d.id;
      if (e.bytes.empty()) continue;
      ASSERT_EQ(std::memcmp(memory.data() + (e.at - kSlabBytes), e.bytes.data(), e.bytes.size()), 0) << "job " << d.id;
    }
    EXPECT_EQ(answers.size(), expected.size());
  }

 private:
  Job put(std::uint32_t model, Format from, Format to, const std::vector<std::byte>& page) {
    Job job;
    job.model = model;
    job.from = from;
    job.to = to;
    job.source_bytes = source_at_;
    job.destination_bytes = kSlabBytes + destination_at_;
    upload(sources_.window.base() + source_at_, page);
    source_at_ += page.size();
    if (to != Format::none) destination_at_ += make_layout(geometry(model), to).page_bytes;
    KVQ_ASSERT(source_at_ <= kSlabBytes && destination_at_ <= kSlabBytes);
    return job;
  }
  void push(Job job, Expected e) {
    job.id = 1000 + jobs.size();
    expected[job.id] = std::move(e);
    jobs.push_back(job);
  }

  Placed sources_, destinations_;
  std::uint64_t source_at_ = 0, destination_at_ = 0;
};

TEST(Jobs, OfMixedKindsAreAnsweredOnceWithTheHostsBytes) {
  for (const std::uint32_t model : {0u, 1u}) backend().add_model(model, geometry(model));
  Pages pages;
  constexpr Format kPacked[] = {Format::int4, Format::int4_k4, Format::int4_k8, Format::k8v4};
  for (int i = 0; i < 90; ++i) {
    const auto model = static_cast<std::uint32_t>(random_source()() % 2);
    const Format packed = kPacked[random_source()() % 4];
    switch (random_source()() % 8) {
      case 0:
        pages.add(model, packed, Format::dense);
        break;
      case 1:
        pages.add(model, packed, packed);
        break;
      case 2:
        pages.add(model, Format::dense, Format::none);
        break;
      case 3:
        pages.add_damaged(model);
        break;
      case 4:
        pages.add_infinite(model);
        break;
      default:
        pages.add(model, Format::dense, packed);
    }
  }
  pages.add_wild(5 * kSlabBytes, kSlabBytes);    // no slab there
  pages.add_wild(kSlabBytes - 256, kSlabBytes);  // beyond its slab
  pages.add_wild(0, kSlabBytes * kSlabs * 8);    // beyond the arena
  pages.add_wild(0, kSlabBytes, 12345);          // no such model
  ASSERT_TRUE(backend().submit(pages.jobs));
  pages.check(finish(backend()));
  std::vector<JobDone> more;
  EXPECT_FALSE(*KVQ_MUST(backend().poll(more)));
  EXPECT_TRUE(more.empty());
}

TEST(Jobs, MoreThanABatchOfOneKindComeBackToo) {
  backend().add_model(1, geometry(1));
  Pages pages;
  for (int i = 0; i < 700; ++i) pages.add(1, Format::dense, Format::int4);
  ASSERT_TRUE(backend().submit(pages.jobs));
  pages.check(finish(backend()));
}

double time_one() {
  backend().add_model(1, geometry(1));
  Pages pages;
  pages.add(1, Format::dense, Format::int4);
  const double begin = now_ms();
  KVQ_ASSERT(static_cast<bool>(backend().submit(pages.jobs)));
  pages.check(finish(backend()));
  return now_ms() - begin;
}

TEST(Jobs, OneAloneDoesNotWaitForOthers) {
  std::this_thread::sleep_for(std::chrono::milliseconds(150));  // longer than any pause of the pace
  const double took = time_one();
  static_assert(block_bytes(Format::dense, 64) + 3 * block_bytes(Format::dense, 80) == 76 << 10);
  EXPECT_LT(took, 50);
  report("job_alone", "1 page of 76 KiB", took * 1e3, "us");
}

TEST(Jobs, SoonAfterOthersTheyWaitForThePaceUnlessSomebodyWaitsForMemory) {
  time_one();
  report("job_soon_after_another", "1 page of 76 KiB", time_one() * 1e3, "us");
  backend().set_urgent(true);
  double took = 0;
  for (int i = 0; i < 5; ++i) took = std::max(took, time_one());
  backend().set_urgent(false);
  EXPECT_LT(took, 50);
  report("job_soon_after_another_urgent", "1 page of 76 KiB", took * 1e3, "us");
}

constexpr std::uint32_t kPagesOfVictim = 200;

KVQ_ROLE(Victim) {  // transcodes its pages again and again until it is killed
  const Channel channel(arguments.at(0));
  const auto backend = open_backend();
  (void)KVQ_MUST(backend->reserve(kSlabBytes, 4));
  backend->add_model(0, geometry(0));
  const std::uint64_t page_bytes = make_layout(geometry(0), Format::dense).page_bytes;
  for (std::uint32_t slab = 0; slab < 2; ++slab) {
    const auto memory = KVQ_MUST(backend->make_slab());
    (void)KVQ_MUST(backend->place_slab(SlabId{slab}, memory->serial));
    channel.send(memory->exported.get(), memory->serial);
  }
  say("made");
  hear();  // the test has written the pages
  std::vector<Job> jobs;
  for (std::uint32_t page = 0; page < kPagesOfVictim; ++page) {
    Job job;
    job.id = page;
    job.from = Format::dense;
    job.to = Format::int4;
    job.source_bytes = page * page_bytes;
    job.destination_bytes = kSlabBytes + page * page_bytes;
    jobs.push_back(job);
  }
  std::vector<JobDone> done;
  for (bool told = false;;) {
    if (!backend->submit(jobs)) return 1;
    for (bool busy = true; busy;) {
      const Result<bool> polled = backend->poll(done);
      if (!polled) return 2;
      busy = *polled;
      if (!told && !done.empty()) say("running");
      told = told || !done.empty();
    }
    done.clear();
  }
}

TEST(Jobs, WorkerKilledInTheMiddleHasHurtNoPageAndTheNextOneGoesOn) {
  backend().add_model(0, geometry(0));
  std::vector<std::vector<std::byte>> pages;
  for (std::uint32_t i = 0; i < kPagesOfVictim; ++i) pages.push_back(dense_page(0));
  const std::uint64_t page_bytes = pages[0].size();
  for (int round = 0; round < 3; ++round) {
    const Channel channel;
    RoleProcess victim("Victim", {channel.far_end()});
    std::uint64_t serials[2];
    Descriptor files[2] = {channel.receive(&serials[0]), channel.receive(&serials[1])};
    ASSERT_EQ(victim.hear(), "made");
    {
      const Imported slab(files[0].get(), kSlabBytes, Access::read_write);
      for (std::uint32_t i = 0; i < kPagesOfVictim; ++i) upload(slab.base() + i * page_bytes, pages[i]);
    }
    victim.say("go");
    ASSERT_EQ(victim.hear(), "running");
    ::usleep(static_cast<useconds_t>(random_source()() % 20'000));
    EXPECT_EQ(victim.kill(), -SIGKILL);

    const double begin = now_ms();
    for (std::uint32_t slab = 0; slab < 2; ++slab) {
      ASSERT_TRUE(backend().adopt_slab(SlabId{20 + slab}, serials[slab], std::move(files[slab])));
    }
    std::vector<Job> jobs;
    for (std::uint32_t page = 0; page < kPagesOfVictim; ++page) {
      Job job;
      job.id = page;
      job.from = Format::dense;
      job.source_bytes = 20 * kSlabBytes + page * page_bytes;
      jobs.push_back(job);
    }
    ASSERT_TRUE(backend().submit(jobs));
    const std::vector<JobDone> sums = finish(backend());
    ASSERT_EQ(sums.size(), kPagesOfVictim);
    for (const JobDone& sum : sums) ASSERT_EQ(sum.checksum, page_sum(pages[sum.id].data(), page_bytes)) << sum.id;
    if (round == 0) report("slabs_adopted_and_pages_summed", "2 slabs, 200 pages", (now_ms() - begin) * 1e3, "us");
    for (std::uint32_t page = 0; page < kPagesOfVictim; ++page) {
      jobs[page].to = Format::int4;
      jobs[page].destination_bytes = 21 * kSlabBytes + page * page_bytes;
      jobs[page].has_checksum = 1;
      jobs[page].checksum = page_sum(pages[page].data(), page_bytes);
    }
    ASSERT_TRUE(backend().submit(jobs));
    for (const JobDone& d : finish(backend())) {
      const std::vector<std::byte> want = on_host(0, Format::dense, pages[d.id], Format::int4);
      ASSERT_EQ(d.code, Errc::ok);
      ASSERT_EQ(d.checksum, page_sum(want.data(), want.size()));
    }
    backend().release_slab(SlabId{20});
    backend().release_slab(SlabId{21});
  }
}

}  // namespace
}  // namespace kvq::test

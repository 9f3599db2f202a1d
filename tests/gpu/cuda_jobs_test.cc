// The worker's jobs and their pace over a driver and a transcoder that are made up, so that no GPU is needed: what is
// launched when, that nothing is lost, and that the worker may sleep in between.
#include "daemon/gpu/cuda_jobs.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "kernels/host_kernels.h"
#include "kernels/logit_noise.h"

// --- what the code under test is linked with in place of CUDA ---

namespace kvq::cuda {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

bool in_mps = false, reads_fail = false;
constexpr auto kBatchTakes = 200us;

struct Launch {
  std::size_t jobs;
  Clock::time_point at;
};

class FakeTranscoder final : public Transcoder {
 public:
  FakeTranscoder(std::uint32_t max_jobs, std::uint32_t batches) : max_jobs_(max_jobs), ends_(batches) {}
  Result<std::uint32_t> launch(const ModelGeometry&, const PageLayout&, const PageLayout*,
                               std::span<const PageJob> jobs) override {
    EXPECT_LE(jobs.size(), max_jobs_);
    for (std::uint32_t ticket = 0; ticket < ends_.size(); ++ticket) {
      if (ends_[ticket]) continue;
      last_end_ = std::max(last_end_, Clock::now()) + kBatchTakes;
      ends_[ticket] = last_end_;
      launches.push_back({jobs.size(), Clock::now()});
      return ticket;
    }
    ADD_FAILURE() << "no ticket is free";
    return Error{Errc::limit_reached, 0, ""};
  }
  Result<bool> is_done(std::uint32_t ticket) override { return Clock::now() >= *ends_[ticket]; }
  void collect(std::uint32_t ticket, std::span<PageJobDone> results) override {
    for (PageJobDone& r : results) r = {};
    ends_[ticket].reset();
  }

  static std::vector<Launch> launches;

 private:
  const std::uint32_t max_jobs_;
  std::vector<std::optional<Clock::time_point>> ends_;
  Clock::time_point last_end_{};
};
std::vector<Launch> FakeTranscoder::launches;

CUresult set_attribute(int* value, CUdevice_attribute which, CUdevice) {
  if (which == CU_DEVICE_ATTRIBUTE_MPS_ENABLED) *value = in_mps ? 1 : 0;
  if (which == CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) *value = 3'125'000;
  if (which == CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) *value = 6144;
  return CUDA_SUCCESS;
}

}  // namespace

Result<const Driver*> driver() {
  static const Driver fake = [] {
    Driver d;
    d.primary_ctx_set_flags = [](CUdevice, unsigned) { return CUDA_SUCCESS; };
    d.primary_ctx_retain = [](CUcontext*, CUdevice) { return CUDA_SUCCESS; };
    d.primary_ctx_release = [](CUdevice) { return CUDA_SUCCESS; };
    d.ctx_set_current = [](CUcontext) { return CUDA_SUCCESS; };
    d.ctx_set_limit = [](CUlimit, std::size_t) { return CUDA_SUCCESS; };
    d.device_get_attribute = set_attribute;
    d.stream_create_with_priority = [](CUstream*, unsigned, int) { return CUDA_SUCCESS; };
    d.stream_destroy = [](CUstream) { return CUDA_SUCCESS; };
    d.memcpy_dtoh = [](void* to, CUdeviceptr from, std::size_t bytes) {
      std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
      return reads_fail ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS;
    };
    return d;
  }();
  return &fake;
}
Result<std::vector<Gpu>> visible_gpus() { return std::vector<Gpu>{{.uuid = "GPU-0"}}; }
bool is_context_lost(int) { return false; }
Error driver_error(int native, const char* context) { return {Errc::system, native, context}; }
const char* driver_text(int) { return ""; }
Result<std::unique_ptr<Transcoder>> Transcoder::create(std::uint32_t max_jobs, std::uint32_t batches, Stream) {
  return std::unique_ptr<Transcoder>(std::make_unique<FakeTranscoder>(max_jobs, batches));
}

}  // namespace kvq::cuda

namespace kvq::gpu {
namespace {

using cuda::Clock;
using cuda::FakeTranscoder;
using namespace std::chrono_literals;

class CudaJobsTest : public ::testing::Test {
 protected:
  void start(bool in_mps) {
    cuda::in_mps = in_mps;
    FakeTranscoder::launches.clear();
    std::string why_not;
    auto opened = CudaContext::open("", why_not);
    ASSERT_TRUE(opened) << why_not;
    context = std::move(*opened);
    auto made = CudaJobs::create(
        *context, [this](std::uint64_t at, std::uint64_t) { return at == kWild ? nullptr : memory.data() + at; });
    ASSERT_TRUE(made);
    jobs = std::move(*made);
    ModelGeometry geometry;  // pages of 8 MiB
    geometry.layers = 32;
    for (std::uint32_t i = 0; i < 32; ++i) geometry.layer[i] = {8, 128, Dtype::fp16, 0};
    jobs->add_model(0, geometry);
  }
  void submit(std::uint32_t count, Format from, Format to, std::uint32_t model = 0, std::uint64_t source = 0) {
    std::vector<Job> made;
    for (std::uint32_t i = 0; i < count; ++i) {
      made.push_back({.id = ++last_id, .model = model, .from = from, .to = to, .source_bytes = source});
    }
    jobs->submit(made);
  }
  // Until nothing is left, or for `most`; as the worker does: it sleeps as long as it may.
  bool finish(std::chrono::milliseconds most = 5s) {
    for (const auto end = Clock::now() + most; Clock::now() < end;) {
      std::vector<JobDone> done;
      const Result<bool> busy = jobs->poll(done);
      EXPECT_TRUE(busy);
      for (const JobDone& d : done) {
        EXPECT_TRUE(codes.emplace(d.id, d.code).second) << "job " << d.id << " is answered twice";
        noise[d.id] = d.noise;
      }
      if (!*busy) return true;
      ++looks;
      std::this_thread::sleep_for(std::min<PaceTime>(jobs->quiet(), 50ms));
    }
    return false;
  }
  static PaceTime since(Clock::time_point begin) { return Clock::now() - begin; }
  static PaceTime apart(std::size_t launch) {
    return FakeTranscoder::launches[launch].at - FakeTranscoder::launches[launch - 1].at;
  }

  static constexpr std::uint64_t kWild = 77;
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 16);  // read by who measures alone
  std::unique_ptr<CudaContext> context;
  std::unique_ptr<CudaJobs> jobs;
  std::map<std::uint64_t, Errc> codes;
  std::map<std::uint64_t, float> noise;
  std::uint64_t last_id = 0;
  int looks = 0;
};

TEST_F(CudaJobsTest, WhatWaitsTogetherGoesInOneBurstEachKindInABatchOfItsOwn) {
  start(false);
  const auto begin = Clock::now();
  for (const Format to : {Format::int4, Format::none, Format::dense}) submit(5, Format::dense, to);
  for (const Format to : {Format::dense, Format::none, Format::int4}) submit(5, Format::int4, to);
  ASSERT_TRUE(finish());
  EXPECT_LT(since(begin), 90ms) << "no pause between its batches, though tickets are fewer";
  EXPECT_EQ(FakeTranscoder::launches.size(), 6u);
  EXPECT_EQ(codes.size(), last_id);
}

TEST_F(CudaJobsTest, AMeasuredLayerIsReadBackAndComparedAndNoOther) {
  start(false);
  ModelGeometry g;
  g.layers = 2;
  g.layer[0] = g.layer[1] = {1, 64, Dtype::fp16, 0};
  jobs->add_model(1, g);
  const PageLayout dense = make_layout(g, Format::dense), cold = make_layout(g, Format::int4);
  auto* values = reinterpret_cast<std::uint16_t*>(memory.data());
  for (std::size_t i = 0; i < dense.page_bytes / 2; ++i) values[i] = static_cast<std::uint16_t>(0x3c00 + 37 * i % 999);
  const std::uint64_t destination = dense.page_bytes;
  ASSERT_LE(destination + cold.page_bytes, memory.size());
  ASSERT_TRUE(transcode_page(g, dense, memory.data(), cold, memory.data() + destination));
  const auto job = [&](std::uint16_t measured, Format to) {
    return Job{.id = ++last_id,
               .model = 1,
               .from = Format::dense,
               .to = to,
               .measured = measured,
               .destination_bytes = destination};
  };
  jobs->submit(
      std::vector<Job>{job(kNoLayer, Format::int4), job(1, Format::int4), job(2, Format::int4), job(1, Format::none)});
  ASSERT_TRUE(finish());
  const float expected = logit_noise(g.layer[1], dense.layer[1], memory.data() + dense.layer[1].offset_bytes,
                                     cold.layer[1], memory.data() + destination + cold.layer[1].offset_bytes);
  EXPECT_GT(expected, 0);
  EXPECT_EQ(noise,
            (std::map<std::uint64_t, float>{{1, kNotMeasured}, {2, expected}, {3, kNotMeasured}, {4, kNotMeasured}}));
}

TEST_F(CudaJobsTest, AReadThatFailsIsALostContext) {
  start(false);
  memory.resize(16 << 20);
  jobs->submit(std::vector<Job>{{.id = 1, .from = Format::dense, .to = Format::int4, .measured = 0}});
  cuda::reads_fail = true;
  std::vector<JobDone> done;
  Result<bool> busy = true;
  for (const auto end = Clock::now() + 5s; busy && *busy && Clock::now() < end;) busy = jobs->poll(done);
  cuda::reads_fail = false;
  ASSERT_FALSE(busy);
  EXPECT_EQ(busy.error().code, Errc::context_lost);
}

TEST_F(CudaJobsTest, TheNextBurstWaitsForItsTimeAndTheWorkerSleepsMeanwhile) {
  start(false);
  submit(1, Format::dense, Format::int4);
  ASSERT_TRUE(finish());
  looks = 0;
  submit(1, Format::dense, Format::int4);  // little
  ASSERT_TRUE(finish());
  EXPECT_GE(apart(1), 100ms);
  submit(100, Format::dense, Format::int4);  // much
  ASSERT_TRUE(finish());
  EXPECT_GE(apart(2), 25ms);
  EXPECT_LT(apart(2), 90ms);
  EXPECT_LT(looks, 40);
}

TEST_F(CudaJobsTest, ButNotWhenSomebodyWaitsForMemory) {
  start(false);
  submit(1, Format::dense, Format::int4);
  ASSERT_TRUE(finish());
  submit(1, Format::dense, Format::int4);
  EXPECT_FALSE(finish(10ms));
  EXPECT_GT(jobs->quiet(), 10ms);
  jobs->set_urgent(true);
  EXPECT_EQ(jobs->quiet(), 0ms);
  const auto begin = Clock::now();
  ASSERT_TRUE(finish());
  EXPECT_LT(since(begin), 80ms);
}

TEST_F(CudaJobsTest, OutsideMpsABurstIsNoMoreThanItsBytes) {
  start(false);
  submit(700, Format::dense, Format::int4);
  ASSERT_TRUE(finish());
  ASSERT_EQ(FakeTranscoder::launches.size(), 3u);
  EXPECT_EQ(FakeTranscoder::launches[0].jobs, 318u);  // 2.67 GB
  EXPECT_EQ(FakeTranscoder::launches[2].jobs, 64u);
  EXPECT_GE(apart(1), 25ms);
  EXPECT_EQ(codes.size(), 700u);
}

TEST_F(CudaJobsTest, InMpsSmallBatchesAreSpread) {
  start(true);
  submit(100, Format::dense, Format::int4);
  ASSERT_TRUE(finish());
  ASSERT_EQ(FakeTranscoder::launches.size(), 7u);
  for (std::size_t i = 1; i < 7; ++i) EXPECT_GE(apart(i), 1250us);
  EXPECT_EQ(FakeTranscoder::launches[0].jobs, 16u);
  FakeTranscoder::launches.clear();
  jobs->set_urgent(true);
  submit(100, Format::dense, Format::int4);
  std::vector<JobDone> done;
  ASSERT_TRUE(jobs->poll(done));
  EXPECT_EQ(FakeTranscoder::launches.size(), 4u) << "as many as there are tickets, at once";
  ASSERT_TRUE(finish());
  EXPECT_EQ(FakeTranscoder::launches.size(), 7u);
}

TEST_F(CudaJobsTest, AllThatKvqdMaySubmitIsAnsweredAndWhatIsNoPageRefused) {
  start(false);
  jobs->set_urgent(true);
  submit(1, Format::dense, Format::int4, 9);         // no such model
  submit(1, Format::dense, Format::int4, 0, kWild);  // no slab there
  submit(1, Format::none, Format::none);
  submit(kJobsInFlight - 3, Format::dense, Format::int4);
  ASSERT_TRUE(finish());
  EXPECT_EQ(codes.size(), kJobsInFlight);
  for (const auto& [id, code] : codes) EXPECT_EQ(code, id <= 3 ? Errc::invalid_argument : Errc::ok) << id;
}

}  // namespace
}  // namespace kvq::gpu

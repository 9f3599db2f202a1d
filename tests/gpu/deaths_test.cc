// Deaths on a GPU, with a real kvqd and its worker: servers killed in the middle of a kernel, the worker killed and
// stopped in the middle of transcodes.
//
// Invariant: what a death must not touch is compared byte by byte, or with the oracle over the very bytes that were
// read.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "client/abi.h"
#include "tests/gpu/client_kernels.h"
#include "tests/gpu/gpu_model.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void pause_us(std::uint64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// Arguments: socket. Takes most of the arena and writes to all of it without end, in a step that does not end.
KVQ_ROLE(gpu_victim) {
  GpuModel gpu(arguments[0]);
  Sequence sequence = gpu.model().open({});
  sequence.reserve(700 * KVQ_PAGE_TOKENS, 20'000);
  const auto table = sequence.block_table();
  const client::Model& inner = *gpu.get()->model;
  std::vector<std::byte*> pages;
  for (const std::int32_t page : table) {
    pages.push_back(inner.memory().arena() + inner.entry(PageId{static_cast<std::uint32_t>(page)}).offset_bytes);
  }
  const OnGpu<std::byte*> on_gpu(pages);
  const Stream stream;
  Step step(gpu.model());
  if (scribble_on(stream, on_gpu.data(), static_cast<std::uint32_t>(pages.size()), 32 << 10, 60'000) != 0) return 3;
  say("writing");
  hear();
  return 4;  // nobody killed it
}

// Of the way in which kvqd passes memory on.
class ServerDeathOnGpu : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, ServerDeathOnGpu, ::testing::Values("vmm", "legacy"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(ServerDeathOnGpu, KilledServersLeaveTheirMemoryToOthersAndTouchNothingOfTheirs) {
  DaemonProcess daemon(gpu_settings(0.97, GetParam()));
  GpuModel gpu(daemon.socket(), {.floor_dense = true});  // what it has is not quantized, so its bytes stay
  const auto tokens = token_stream(1, 200);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, tokens);
  gpu.tiny().await_cached(tokens, 192);
  const auto table = sequence.block_table();
  const auto words = gpu.entry_words(table);
  std::vector<std::vector<std::byte>> before;
  for (const std::uint64_t word : words) before.push_back(gpu.page_bytes(word));
  std::uint32_t first_token = 6;
  for (const std::uint64_t after_us : {0, 300, 1000, 3000, 10'000, 30'000, 100'000, 300'000}) {
    RoleProcess victim("gpu_victim", {daemon.socket()});
    ASSERT_EQ(victim.hear(), "writing");
    Sequence wanting = gpu.model().open({});
    EXPECT_EQ(kvq_reserve(wanting.get(), 800 * KVQ_PAGE_TOKENS, 20), KVQ_ERR_NO_MEMORY);
    pause_us(after_us);
    const auto killed = Clock::now();
    EXPECT_EQ(victim.kill(), -SIGKILL);
    check(kvq_reserve(wanting.get(), 800 * KVQ_PAGE_TOKENS, 30'000));
    std::printf("killed after %llu us in the kernel: its memory again after %.0f ms\n",
                static_cast<unsigned long long>(after_us), ms_since(killed));
    const auto over = token_stream(++first_token, 700 * KVQ_PAGE_TOKENS);
    gpu.write(wanting, 0, over);  // over all that it had
    gpu.tiny().await_cached(over, over.size());
    EXPECT_EQ(gpu.entry_words(table), words);
    for (std::size_t i = 0; i < words.size(); ++i)
      EXPECT_EQ(gpu.page_bytes(words[i]), before[i]) << "page " << table[i];
    EXPECT_EQ(gpu.attend_and_check(wanting.block_table(), 700 * KVQ_PAGE_TOKENS, 1, test_seed()).exact, 1u);
  }
  EXPECT_EQ(gpu.attend_and_check(table, 200, 0, test_seed()).exact, 1u);
}

// Arguments: socket. Faults on a write through its read-only mapping of the mirror.
KVQ_ROLE(gpu_offender) {
  GpuModel gpu(arguments[0]);
  Sequence sequence = gpu.model().open({});
  const auto tokens = token_stream(9, 100);
  gpu.write(sequence, 0, tokens);
  gpu.tiny().await_cached(tokens, 64);
  std::uint64_t running = 0, open = 0, step = 0;
  check(kvq_step_begin(gpu.get(), &running));
  check(kvq_step_begin(gpu.get(), &open));
  expect(spin_on(nullptr, 50) == 0, "launching");
  expect(store_on(nullptr, gpu.get()->model->memory().kernel_entries(), ~0ull) == 0, "launching");
  check(kvq_step_end(gpu.get(), running, nullptr));
  say(cudaGetErrorString(cudaDeviceSynchronize()));
  const client::Steps& steps = gpu.get()->model->steps();
  expect(kvq_step_end(gpu.get(), open, nullptr) == KVQ_ERR_CONTEXT_LOST, "end of an open step");
  expect(steps.is_over(running) && steps.is_over(open), "steps are over");
  expect_lost(kvq_step_begin(gpu.get(), &step), "begin");
  say("session kept, " + std::to_string(sequence.info().pages) + " pages");
  return 0;
}

// Arguments: socket. Opens what the offender had sealed.
KVQ_ROLE(gpu_successor) {
  GpuModel gpu(arguments[0]);
  std::uint64_t cached = 0;
  Sequence sequence = gpu.model().open(token_stream(9, 100), &cached);
  if (cached != 64) return 3;
  return gpu.attend_and_check(sequence.block_table(), 64, 1, test_seed()).exact == 1 ? 0 : 4;
}

TEST(DeathOnGpu, WriteToTheMirrorFaultsItsProcessAloneAndAnotherGoesOnFromItsPages) {
  DaemonProcess daemon(gpu_settings(0.9, "vmm"));
  GpuModel gpu(daemon.socket());
  const auto tokens = token_stream(1, 100);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, tokens);
  gpu.tiny().await_cached(tokens, 64);
  RoleProcess offender("gpu_offender", {daemon.socket()});
  EXPECT_NE(offender.hear().find("illegal memory access"), std::string::npos);
  EXPECT_EQ(offender.hear(), "session kept, 2 pages");
  EXPECT_EQ(offender.wait(), 0);
  EXPECT_EQ(gpu.attend_and_check(sequence.block_table(), 100, 1, test_seed()).exact, 1u);
  RoleProcess successor("gpu_successor", {daemon.socket()});
  EXPECT_EQ(successor.wait(), 0);
}

// Arguments: socket. Reads a cached stream again and again, until told to end.
KVQ_ROLE(gpu_steady_reader) {
  GpuModel gpu(arguments[0]);
  const auto tokens = token_stream(3, 8 * KVQ_PAGE_TOKENS);
  std::uint64_t cached = 0, calls = 0;
  Sequence sequence = gpu.model().open(tokens, &cached);
  if (cached != tokens.size()) return 3;
  const auto table = sequence.block_table();
  for (std::string word = "go"; word == "go"; word = hear()) {
    const auto until = Clock::now() + std::chrono::milliseconds(300);
    for (; Clock::now() < until; ++calls) {
      gpu.attend_and_check(table, static_cast<std::int32_t>(cached), static_cast<std::uint32_t>(calls % kLayers),
                           test_seed() + calls);
    }
    say(std::to_string(calls));
  }
  return gpu.fault().status == KVQ_OK ? 0 : 4;
}

// The longest that kvqd let anybody wait for its status.
nlohmann::json ask(RawSession& session, double& longest_ms) {
  const auto asked = Clock::now();
  nlohmann::json status = nlohmann::json::parse(session.status());
  longest_ms = std::max(longest_ms, ms_since(asked));
  return status;
}

TEST(DeathOnGpu, WorkerKilledAndStoppedInTheMiddleOfTranscodesLosesNothing) {
  DaemonProcess daemon(gpu_settings(0.1, "vmm") + "--worker-deadline-ms=300\n");
  GpuModel gpu(daemon.socket());
  const auto tokens = token_stream(3, 8 * KVQ_PAGE_TOKENS);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, tokens);
  gpu.tiny().await_cached(tokens, tokens.size());
  RoleProcess reader("gpu_steady_reader", {daemon.socket()});
  RawSession session(daemon.socket());
  double longest_ms = 0;
  std::vector<Sequence> others;
  for (std::uint32_t death = 0; death < 8; ++death) {
    const auto written = token_stream(100 + death, 60 * KVQ_PAGE_TOKENS);
    Sequence other = gpu.model().open({});
    gpu.write(other, 0, written);
    gpu.tiny().await_cached(written, written.size());
    const std::uint64_t restarts = ask(session, longest_ms)["device_health"]["worker_restarts"];
    if (death % 2 == 0) session.quantize();  // at other times what waits is the next worker's
    pause_us(test_seed() * 131 * (death + 1) % 3000);
    const pid_t worker = worker_of(daemon.pid());
    ASSERT_GT(worker, 0);
    ::kill(worker, death % 3 == 0 ? SIGSTOP : SIGKILL);
    if (death % 2 == 1) session.quantize();
    reader.hear();
    await("the next worker", [&] {
      const auto health = ask(session, longest_ms)["device_health"];
      return health["worker_restarts"] > restarts && health["state"] == "ok";
    });
    reader.say("go");
    others.push_back(std::move(other));
  }
  reader.hear();
  reader.say("end");
  EXPECT_EQ(reader.wait(), 0);
  session.verify();
  const auto status = ask(session, longest_ms);
  EXPECT_EQ(status["verify"]["pages_bad_ever"], 0);
  EXPECT_GT(status["verify"]["pages_done"], 8 * 60);
  EXPECT_GT(status["transcodes"]["done"], 100);
  EXPECT_LT(longest_ms, 1000) << "kvqd answers all the while";
  gpu.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(tokens.size()), 0, test_seed());
  for (const Sequence& other : others) gpu.attend_and_check(other.block_table(), 60 * KVQ_PAGE_TOKENS, 1, test_seed());
}

}  // namespace
}  // namespace kvq::test

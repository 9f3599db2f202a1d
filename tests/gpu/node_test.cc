// Several processes and a real kvqd on one GPU: a shared prefix, pages quantized under their readers; over descriptors
// and over legacy handles.
//
// Invariant: every attention result is compared with the oracle over the bytes that it read.
#include <gtest/gtest.h>

#include <chrono>
#include <sstream>

#include "client/abi.h"
#include "tests/gpu/client_kernels.h"
#include "tests/gpu/gpu_model.h"
#include "tests/support/daemon_process.h"
#include "tests/support/held_daemon.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

// Of the way in which kvqd passes memory on.
class NodeOnGpu : public ::testing::TestWithParam<const char*> {
 protected:
  static std::string settings(double quantize_at) { return gpu_settings(quantize_at, GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Over, NodeOnGpu, ::testing::Values("vmm", "legacy"),
                         [](const auto& info) { return std::string(info.param); });

// Arguments: socket. Opens what another process wrote and reads all of it.
KVQ_ROLE(gpu_sharer) {
  GpuModel gpu(arguments[0]);
  const auto tokens = token_stream(1, 200);
  std::uint64_t cached = 0;
  Sequence sequence = gpu.model().open(tokens, &cached);
  const auto table = sequence.block_table();
  std::uint64_t exact = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer)
    exact += gpu.attend_and_check(table, static_cast<std::int32_t>(cached), layer, test_seed(), 20).exact;
  say(std::to_string(cached) + " tokens of page " + std::to_string(table[0]) + ", " + std::to_string(exact) + " exact");
  hear();
  return 0;
}

TEST_P(NodeOnGpu, SecondProcessAttendsToThePagesOfTheFirst) {
  DaemonProcess daemon(settings(0.9));
  GpuModel gpu(daemon.socket());
  EXPECT_STREQ(gpu.model().info().device, "cuda");
  const auto tokens = token_stream(1, 200);
  Sequence sequence = gpu.model().open({});
  const Stream stream;
  gpu.write(sequence, 0, tokens, stream);
  gpu.tiny().await_cached(tokens, 192);
  RoleProcess sharer("gpu_sharer", {daemon.socket()});
  EXPECT_EQ(sharer.hear(), "192 tokens of page " + std::to_string(sequence.block_table()[0]) + ", 40 exact");
  EXPECT_EQ(gpu.attend_and_check(sequence.block_table(), 200, 1, test_seed(), 5, stream).exact, 5u);
  sharer.say("done");
  EXPECT_EQ(sharer.wait(), 0);
}

TEST_P(NodeOnGpu, SealWaitsForTheGpu) {
  DaemonProcess daemon(settings(0.9));
  GpuModel gpu(daemon.socket());
  const auto tokens = token_stream(2, 64);
  Sequence sequence = gpu.model().open({});
  sequence.reserve(64, 10'000);
  const Stream stream;
  Step step(gpu.model());
  gpu.append(sequence, 0, tokens, stream);
  ASSERT_EQ(spin_on(stream, 400), 0);
  step.end(stream);
  sequence.commit(tokens, step.serial());
  check(kvq_credits_request(gpu.get(), 16, 10'000));  // kvqd has seen the seal, and has had a tick
  EXPECT_EQ(gpu.model().lookup(tokens).cached_tokens, 0u);
  stream.wait();
  gpu.tiny().await_cached(tokens, 64);
}

// Arguments: socket. Reads a cached stream until pages of it are quantized, and a little longer: its first page stays
// dense.
KVQ_ROLE(gpu_moving_reader) {
  GpuModel gpu(arguments[0]);
  const auto tokens = token_stream(3, 6 * KVQ_PAGE_TOKENS);
  std::uint64_t cached = 0;
  Sequence sequence = gpu.model().open(tokens, &cached);
  if (cached != tokens.size()) return 3;
  const auto table = sequence.block_table();
  kvq::test::Seen total;
  say("reading");
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(40);
  while (total.mixed < 200 && std::chrono::steady_clock::now() < until) {
    const auto seen =
        gpu.attend_and_check(table, static_cast<std::int32_t>(cached),
                             static_cast<std::uint32_t>(total.calls % kLayers), test_seed() + total.calls);
    total.calls += seen.calls;
    total.dense += seen.dense;
    total.mixed += seen.mixed;
    total.quantized += seen.quantized;
    if (total.calls % 100 == 0) say("on");
  }
  std::ostringstream line;
  line << "done " << total.calls << " calls: " << total.dense << " dense, " << total.mixed << " mixed, "
       << total.quantized << " quantized";
  say(line.str());
  return total.dense > 0 && total.mixed >= 200 && gpu.fault().status == KVQ_OK ? 0 : 4;
}

TEST_P(NodeOnGpu, PagesAreQuantizedUnderAReaderThatSeesOneFormatOrTheOther) {
  DaemonProcess daemon(settings(0.2));
  GpuModel gpu(daemon.socket());
  const auto tokens = token_stream(3, 6 * KVQ_PAGE_TOKENS);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, tokens);
  gpu.tiny().await_cached(tokens, tokens.size());
  RoleProcess reader("gpu_moving_reader", {daemon.socket()});
  ASSERT_EQ(reader.hear(), "reading");
  std::vector<Sequence> others;  // pressure
  for (std::uint32_t i = 0; i < 10; ++i) {
    others.push_back(gpu.model().open({}));
    gpu.write(others.back(), 0, token_stream(100 + i, 40 * KVQ_PAGE_TOKENS));
  }
  std::string line = reader.hear();
  while (line == "on") line = reader.hear();
  std::printf("%s\n", line.c_str());
  EXPECT_EQ(reader.wait(), 0) << line;
  EXPECT_GT(gpu.model().lookup(tokens).quantized_tokens, 0u);
  gpu.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(tokens.size()), 0, test_seed(), 3);
  // A cut inside a quantized page makes it dense again, by a copy on the GPU.
  sequence.truncate(3 * KVQ_PAGE_TOKENS + 10, 10'000);
  gpu.attend_and_check(sequence.block_table(), 3 * KVQ_PAGE_TOKENS + 10, 1, test_seed());
}

// The session is lost when the connection breaks, not when the next kvqd says so: what it maps is in that one's way.
TEST(NodeOverLegacyHandles, PagesEndWithKvqdAndTheNextStartsClean) {
  HeldDaemon daemon(gpu_settings(0.9, "legacy"));
  const auto tokens = token_stream(8, 200);
  {
    GpuModel gpu(daemon.socket());
    Sequence sequence = gpu.model().open({});
    gpu.write(sequence, 0, tokens);
    gpu.tiny().await_cached(tokens, 192);
    daemon.kill();
    kvq_status status = KVQ_OK;
    await("the session's end", [&] { return (status = kvq_credits_request(gpu.get(), 1, 100)) != KVQ_OK; });
    EXPECT_EQ(status, KVQ_ERR_DAEMON_GONE);
    EXPECT_NE(std::string(kvq_last_error()).find("this GPU's memory ends with kvqd"), std::string::npos)
        << kvq_last_error();
  }
  daemon.await_lives(2);
  EXPECT_NE(daemon.log().find("event=adopt_refused"), std::string::npos) << daemon.log();
  GpuModel gpu(daemon.socket());
  EXPECT_EQ(gpu.model().lookup(tokens).cached_tokens, 0u);
  Sequence sequence = gpu.model().open({});
  gpu.write(sequence, 0, tokens);
  gpu.tiny().await_cached(tokens, 192);
  EXPECT_EQ(gpu.attend_and_check(sequence.block_table(), 200, 1, test_seed()).exact, 1u);
}

}  // namespace
}  // namespace kvq::test

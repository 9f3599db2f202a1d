// Pages of one process attended to by another: same bytes, same results as the oracle's, before and after quantization.
#include <gtest/gtest.h>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

constexpr std::uint32_t kPages = 4;
constexpr std::size_t kTokens = kPages * KVQ_PAGE_TOKENS + 10;

// Writes stream 1 and holds it until told to end.
KVQ_ROLE(writer) {
  TinyModel tiny(arguments[0], {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, kTokens));
  say("written");
  hear();
  return 0;
}

TEST(Attach, AnotherProcessReadsTheSameBytesAndResults) {
  DaemonProcess daemon(calm_settings());
  RoleProcess writer("writer", {daemon.socket()});
  ASSERT_EQ(writer.hear(), "written");
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, kTokens);
  tiny.await_cached(tokens, kPages * KVQ_PAGE_TOKENS);
  const kvq_lookup_result found = tiny.model().lookup(tokens);
  EXPECT_EQ(found.cached_tokens, kPages * KVQ_PAGE_TOKENS);
  EXPECT_EQ(found.dense_tokens, found.cached_tokens);

  std::uint64_t cached = 0;
  Sequence sequence = tiny.model().open(tokens, &cached);
  ASSERT_EQ(cached, kPages * KVQ_PAGE_TOKENS);
  const auto table = sequence.block_table();
  for (std::uint32_t p = 0; p < kPages; ++p) {
    EXPECT_TRUE(tiny.check_dense_bytes(table[p], p * KVQ_PAGE_TOKENS, tokens.data() + p * KVQ_PAGE_TOKENS));
  }
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const Seen seen = tiny.attend_and_check(table, kPages * KVQ_PAGE_TOKENS, layer, test_seed());
    EXPECT_EQ(seen.exact, 1u);
    EXPECT_EQ(seen.dense, 1u);
  }
  writer.say("end");
  EXPECT_EQ(writer.wait(), 0);
}

TEST(Attach, ResultsEqualTheOracleAfterQuantizationAndTheWritersEnd) {
  DaemonProcess daemon(calm_settings());
  const auto tokens = token_stream(1, kTokens);
  {
    RoleProcess writer("writer", {daemon.socket()});
    ASSERT_EQ(writer.hear(), "written");
    TinyModel watcher(daemon.socket(), {});
    watcher.await_cached(tokens, kPages * KVQ_PAGE_TOKENS);
    writer.say("end");
    ASSERT_EQ(writer.wait(), 0);
  }
  TinyModel tiny(daemon.socket(), {});
  RawSession(daemon.socket()).quantize();
  tiny.await_quantized(tokens, kPages * KVQ_PAGE_TOKENS);

  std::uint64_t cached = 0;
  Sequence sequence = tiny.model().open(tokens, &cached);
  ASSERT_EQ(cached, kPages * KVQ_PAGE_TOKENS);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const Seen seen = tiny.attend_and_check(sequence.block_table(), kPages * KVQ_PAGE_TOKENS, layer, test_seed());
    EXPECT_EQ(seen.exact, 1u);
    EXPECT_EQ(seen.quantized, 1u);
  }
  EXPECT_EQ(sequence.info().quantized_pages, kPages);

  // A sequence that insists on dense pages attaches none of these.
  kvq_open_options dense_only{};
  dense_only.size = sizeof(dense_only);
  dense_only.format_floor_dense = 1;
  Sequence strict = tiny.model().open(tokens, &cached, &dense_only);
  EXPECT_EQ(cached, 0u);

  // A cut inside a quantized page goes on in a dense copy of it.
  sequence.truncate(100, 5000);
  EXPECT_EQ(sequence.info().committed_tokens, 100u);
  const auto more = token_stream(2, 60);
  tiny.write(sequence, 100, more);
  EXPECT_NO_THROW(tiny.attend_and_check(sequence.block_table(), 160, 0, test_seed()));
}

TEST(Attach, ForkSharesFullPagesAndCopiesTheLast) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(3, 150);
  Sequence parent = tiny.model().open({});
  tiny.write(parent, 0, tokens);
  Sequence child = parent.fork(5000);
  const auto a = parent.block_table(), b = child.block_table();
  ASSERT_EQ(a.size(), 3u);
  ASSERT_EQ(b.size(), 3u);
  EXPECT_EQ(a[0], b[0]);
  EXPECT_EQ(a[1], b[1]);
  EXPECT_NE(a[2], b[2]);
  tiny.write(parent, 150, token_stream(4, 50));
  tiny.write(child, 150, token_stream(5, 50));
  tiny.attend_and_check(parent.block_table(), 200, 1, test_seed());
  tiny.attend_and_check(child.block_table(), 200, 1, test_seed());
  parent = Sequence();
  auto expected = tokens;
  for (const std::uint32_t t : token_stream(5, 50)) expected.push_back(t);
  for (std::uint64_t p = 0; p < 3; ++p) {
    EXPECT_TRUE(tiny.check_dense_bytes(child.block_table()[p], p * 64, expected.data() + p * 64)) << p;
  }
}

TEST(Attach, UncommittedTokensAreOverwrittenAndPrivateOnesNeverShared) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(6, 64), drafts = token_stream(7, 64);
  kvq_open_options secret{};
  secret.size = sizeof(secret);
  secret.private_pages = 1;
  Sequence sequence = tiny.model().open({}, nullptr, &secret);
  tiny.write(sequence, 0, drafts, 5000, false);  // never committed
  tiny.write(sequence, 0, tokens);
  EXPECT_TRUE(tiny.check_dense_bytes(sequence.block_table()[0], 0, tokens.data()));
  check(kvq_credits_request(tiny.get(), 1, 1000));
  EXPECT_EQ(tiny.model().lookup(tokens).cached_tokens, 0u);
  EXPECT_EQ(tiny.model().lookup(drafts).cached_tokens, 0u);
}

// Data role: attends over a sequence that a control session opened, reserved for and commits.
KVQ_ROLE(computer) {
  ModelOptions options;
  options.role = KVQ_ROLE_DATA;
  TinyModel tiny(arguments[0], options);
  say("session " + std::to_string(tiny.model().info().session));
  const std::string hex = hear();
  std::vector<std::uint8_t> bytes;
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  Sequence view = tiny.model().import_bytes(bytes);
  Step step(tiny.model());
  tiny.append(view, 0, token_stream(8, 64));
  step.end();
  say("step " + std::to_string(step.serial()));
  hear();
  tiny.attend_and_check(view.block_table(), 64, 0, 1);
  const bool refused = kvq_reserve(view.get(), 1, 0) == KVQ_ERR_INVALID_ARGUMENT;
  say(refused ? "done" : "a view may not reserve");
  hear();
  return 0;
}

TEST(Attach, ControlSessionSchedulesWhatADataSessionComputes) {
  DaemonProcess daemon(calm_settings());
  ModelOptions options;
  options.role = KVQ_ROLE_CONTROL;
  TinyModel control(daemon.socket(), options);
  RoleProcess data("computer", {daemon.socket()});
  const auto session = static_cast<std::uint32_t>(std::stoul(data.hear().substr(8)));
  const auto tokens = token_stream(8, 64);
  Sequence sequence = control.model().open({});
  sequence.reserve(64, 10'000);
  std::string hex;
  for (const std::uint8_t byte : sequence.export_bytes()) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  data.say(hex);
  const std::string stepped = data.hear();
  ASSERT_EQ(stepped.substr(0, 5), "step ") << stepped;
  sequence.commit(tokens, std::stoull(stepped.substr(5)), session);
  control.await_cached(tokens, 64);
  data.say("attend");
  EXPECT_EQ(data.hear(), "done");
  std::uint64_t step = 0;
  EXPECT_EQ(kvq_step_begin(control.get(), &step), KVQ_ERR_INVALID_ARGUMENT);
  data.say("end");
  EXPECT_EQ(data.wait(), 0);
}

}  // namespace
}  // namespace kvq::test

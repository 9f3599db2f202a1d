// A client that is killed: what it held is reusable within 250 ms, at whatever moment it died.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kReusableMs = 250;

// Reserves all that it can get, writes some of it, and waits inside an open step.
KVQ_ROLE(hoarder) {
  ModelOptions options;
  options.floor_dense = true;
  TinyModel tiny(arguments[0], options);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 200));
  std::uint64_t pages = 4;
  while (kvq_reserve(sequence.get(), (pages + 1) * KVQ_PAGE_TOKENS, 500) == KVQ_OK) ++pages;
  Step step(tiny.model());
  say(std::to_string(sequence.info().pages));
  hear();
  return 0;
}

TEST(Death, EverythingAKilledClientHeldIsReusableIn250Ms) {
  DaemonProcess daemon(calm_settings());
  ModelOptions options;
  options.floor_dense = true;
  options.credits = 1;
  TinyModel survivor(daemon.socket(), options);
  for (int round = 0; round < 3; ++round) {
    RoleProcess hoarder("hoarder", {daemon.socket()});
    const std::uint64_t held = std::stoull(hoarder.hear());
    ASSERT_GT(held, 90u);
    Sequence wanted = survivor.model().open({});
    ASSERT_EQ(kvq_reserve(wanted.get(), 64 * KVQ_PAGE_TOKENS, 50), KVQ_ERR_NO_MEMORY);
    hoarder.kill();
    const auto killed = Clock::now();
    ASSERT_EQ(kvq_reserve(wanted.get(), 90 * KVQ_PAGE_TOKENS, 10'000), KVQ_OK) << kvq_last_error();
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - killed).count();
    std::printf("round %d: %llu pages reusable after %lld ms\n", round, static_cast<unsigned long long>(held),
                static_cast<long long>(waited));
    EXPECT_LE(waited, static_cast<long long>(kReusableMs));
  }
}

// Does everything a server does, without end, in an order drawn from its seed.
KVQ_ROLE(busy) {
  std::mt19937_64 random(std::stoull(arguments[1]));
  TinyModel tiny(arguments[0], {});
  std::vector<Sequence> open;
  say("started");
  for (;;) {
    const std::uint64_t what = random() % 8;
    if (open.empty() || (what == 0 && open.size() < 6)) {
      open.push_back(tiny.model().open(token_stream(static_cast<std::uint32_t>(random() % 3), 256)));
      continue;
    }
    Sequence& sequence = open[random() % open.size()];
    const std::uint64_t at = sequence.info().committed_tokens;
    std::uint64_t step = 0;
    if (what < 4 && at < 400) {
      tiny.write(sequence, at, token_stream(static_cast<std::uint32_t>(random() % 3), 1 + random() % 100), 20'000);
    } else if (what == 4 && at > 0) {
      sequence.truncate(random() % at, 20'000);
    } else if (what == 5 && open.size() < 6) {
      Sequence child = sequence.fork(20'000);
      open.push_back(std::move(child));
    } else if (what == 6 && at > 0) {
      tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(at), 0, random());
    } else if (kvq_step_begin(tiny.get(), &step) == KVQ_OK) {
      std::swap(sequence, open.back());
      open.pop_back();
      check(kvq_step_end(tiny.get(), step, nullptr));
    }
  }
}

TEST(Death, RandomMomentsLeaveNothingBehind) {
  std::mt19937_64 random(test_seed());
  DaemonProcess daemon(calm_settings());
  ModelOptions options;
  options.floor_dense = true;
  options.credits = 1;
  TinyModel survivor(daemon.socket(), options);
  const auto tokens = token_stream(9, 100);
  Sequence kept = survivor.model().open({});
  survivor.write(kept, 0, tokens);
  for (int round = 0; round < 12; ++round) {
    RoleProcess busy("busy", {daemon.socket(), std::to_string(random())});
    ASSERT_EQ(busy.hear(), "started");
    std::this_thread::sleep_for(
        std::chrono::microseconds(random() % 60'000));  // the moment of death is what is drawn here
    ASSERT_EQ(busy.kill(), -9) << "the role ended by itself: see its message above";
    ASSERT_EQ(survivor.attend_and_check(kept.block_table(), 100, 1, random()).exact, 1u);
  }
  EXPECT_TRUE(survivor.check_dense_bytes(kept.block_table()[0], 0, tokens.data()));
  // Nearly the whole arena can be had again; cached pages of the dead give way.
  Sequence all = survivor.model().open({});
  EXPECT_EQ(kvq_reserve(all.get(), 100 * KVQ_PAGE_TOKENS, 10'000), KVQ_OK) << kvq_last_error() << daemon.log();
}

}  // namespace
}  // namespace kvq::test

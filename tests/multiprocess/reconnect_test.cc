// A daemon that dies and comes back: the client resumes its sessions by itself, and what is refused is lost for good.
#include "tests/multiprocess/reconnect.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <thread>

#include "kvq/kill_point.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

std::vector<std::uint32_t> after(std::vector<std::uint32_t> tokens, std::size_t first) {
  tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(first));
  return tokens;
}

TEST(Reconnect, SessionIsResumedWithItsTokenAndWorkGoesOn) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 200);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, {tokens.begin(), tokens.begin() + 100});
  const std::uint32_t session = tiny.model().info().session;
  ASSERT_EQ(tiny.model().pressure().reconnects, 0u);
  daemon.crash();
  await_away(tiny.get());
  EXPECT_TRUE(rang(tiny.get()));
  daemon.start();
  await_back(tiny.get(), 1);
  EXPECT_TRUE(rang(tiny.get()));
  const FakeDaemon::Seen seen = daemon.seen();
  EXPECT_EQ(seen.resumed, 1u);
  EXPECT_EQ(seen.wrong_tokens, 0u);
  EXPECT_EQ(seen.calls.at("register"), 1u);
  EXPECT_EQ(seen.calls.at("segment"), 1u);  // nothing is mapped anew
  EXPECT_EQ(tiny.model().info().session, session);
  tiny.write(sequence, 100, after(tokens, 100));
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 200, 0, test_seed()).exact, 1u);
}

TEST(Reconnect, StepsRingsAndSharedMemoryDoNotNeedTheDaemon) {
  FakeDaemon daemon;
  ModelOptions options;
  options.credits = 8;
  TinyModel tiny(daemon.socket(), options);
  const auto tokens = token_stream(1, 150);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, {tokens.begin(), tokens.begin() + 64});
  check(kvq_credits_request(tiny.get(), 8, 1000));
  daemon.crash();
  await_away(tiny.get());
  tiny.write(sequence, 64, after(tokens, 64), 0);
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 150, 0, test_seed()).exact, 1u);
  Sequence child = sequence.fork(0);
  child.truncate(30, 0);
  child.drop_before(10);
  child.park();
  { Sequence released = tiny.model().open({}); }
  EXPECT_EQ(kvq_credits_return(tiny.get(), 1), KVQ_OK);
  EXPECT_EQ(tiny.model().lookup(tokens).cached_tokens, 64u);
  EXPECT_EQ(tiny.model().pressure().reconnecting, 1);
  daemon.start();
  await_back(tiny.get(), 1);
  EXPECT_EQ(tiny.model().lookup(tokens).cached_tokens, 128u);  // the next daemon read the seal from the ring
}

TEST(Reconnect, RefusedSessionIsLostAndTheClientRegistersAgain) {
  for (const Errc code : {Errc::stale_id, Errc::permission_denied}) {
    FakeDaemon daemon;
    TinyModel tiny(daemon.socket(), {});
    Sequence sequence = tiny.model().open({});
    tiny.write(sequence, 0, token_stream(1, 64));
    std::uint64_t open = 0, next = 0;
    check(kvq_step_begin(tiny.get(), &open));
    daemon.crash();
    kvq_status waiting = KVQ_OK;
    std::string text;
    std::thread waiter([&] {
      waiting = kvq_credits_request(tiny.get(), 100, 60'000);
      text = kvq_last_error();
    });
    await_away(tiny.get());
    daemon.set({.refuse = code});
    daemon.start();
    waiter.join();
    EXPECT_EQ(waiting, KVQ_ERR_DAEMON_GONE);
    EXPECT_NE(text.find(kStartedAnew), std::string::npos) << text;
    EXPECT_TRUE(rang(tiny.get()));
    EXPECT_EQ(kvq_step_begin(tiny.get(), &next), KVQ_ERR_DAEMON_GONE);
    EXPECT_EQ(kvq_step_end(tiny.get(), open, nullptr), KVQ_OK);
    kvq_pressure pressure{};
    pressure.size = sizeof(pressure);
    EXPECT_EQ(kvq_get_pressure(tiny.get(), &pressure), KVQ_ERR_DAEMON_GONE);
    EXPECT_EQ(kvq_commit(sequence.get(), nullptr, 0, 0, 0), KVQ_ERR_DAEMON_GONE);
    EXPECT_NE(std::strstr(kvq_last_error(), kStartedAnew), nullptr) << kvq_last_error();
    daemon.set({});
    kvq_model* again = register_small(tiny.client());
    check(kvq_credits_request(again, 8, 10'000));
    daemon.crash();
    daemon.start();
    await_back(again, 1);
    check(kvq_model_close(again));
    EXPECT_EQ(daemon.seen().calls.at("reconnect"), 2u);  // the lost one never asks again
  }
}

TEST(Reconnect, AttentionInAnOpenStepOutlivesTheSession) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 64));
  Step step(tiny.model());
  daemon.crash();
  daemon.set({.refuse = Errc::stale_id});
  daemon.start();
  ASSERT_EQ(kvq_credits_request(tiny.get(), 100, 60'000), KVQ_ERR_DAEMON_GONE);
  const std::vector<std::int64_t> slots(64, KVQ_SKIP_SLOT);
  const std::vector<std::uint16_t> zeros(64 * kHeadDim);
  kvq_append_args args{};
  args.size = sizeof(args);
  args.tokens = 64;
  args.k = args.v = zeros.data();
  args.slots = slots.data();
  args.k_token_stride = args.v_token_stride = args.k_head_stride = args.v_head_stride = kHeadDim;
  EXPECT_EQ(kvq_append(tiny.get(), &args), KVQ_OK);
  const std::vector<float> q(kQueryHeads * kHeadDim, 1.0f);
  std::vector<float> out(q.size());
  const std::int32_t starts[] = {0, 1}, length = 64;
  const auto table = sequence.block_table();
  kvq_attend_args attend{};
  attend.size = sizeof(attend);
  attend.batch = 1;
  attend.q = q.data();
  attend.out = out.data();
  attend.q_token_stride = attend.out_token_stride = kQueryHeads * kHeadDim;
  attend.q_head_stride = attend.out_head_stride = kHeadDim;
  attend.q_dtype = attend.out_dtype = KVQ_FP32;
  attend.query_starts = starts;
  attend.seq_lengths = &length;
  attend.block_table = table.data();
  attend.block_table_stride = 1;
  attend.query_heads = kQueryHeads;
  attend.window = -1;
  EXPECT_EQ(kvq_attend(tiny.get(), &attend), KVQ_OK) << kvq_last_error();
  EXPECT_NE(out[0], 0.0f);
}

TEST(Reconnect, AnotherInstanceTenantOrSessionIsNotTheSame) {
  for (const FakeDaemon::Script& script :
       {FakeDaemon::Script{.other_instance = true}, FakeDaemon::Script{.other_session = true},
        FakeDaemon::Script{.other_tenant = true}}) {
    FakeDaemon daemon;
    TinyModel tiny(daemon.socket(), {});
    daemon.crash();
    daemon.set(script);
    daemon.start();
    EXPECT_EQ(kvq_credits_request(tiny.get(), 100, 60'000), KVQ_ERR_DAEMON_GONE);
    EXPECT_NE(std::strstr(kvq_last_error(), kStartedAnew), nullptr) << kvq_last_error();
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (daemon.seen().sessions != 0 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    EXPECT_EQ(daemon.seen().sessions, 0u);  // what it was offered instead was given up
  }
}

TEST(Reconnect, ConnectionCutByALivingDaemonEndsTheSession) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  daemon.cut();
  EXPECT_EQ(kvq_credits_request(tiny.get(), 100, 60'000), KVQ_ERR_DAEMON_GONE);
  EXPECT_NE(std::strstr(kvq_last_error(), "let this session go"), nullptr) << kvq_last_error();
  std::uint64_t step = 0;
  EXPECT_EQ(kvq_step_begin(tiny.get(), &step), KVQ_ERR_DAEMON_GONE);
  EXPECT_EQ(daemon.seen().resumed, 0u);
}

TEST(Reconnect, HundredRestartsInARow) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {}), idle(daemon.socket(), {});
  for (std::uint32_t round = 1; round <= 100; ++round) {
    daemon.crash();
    daemon.start();
    await_back(tiny.get(), round);
    Sequence sequence = tiny.model().open({});
    tiny.write(sequence, 0, token_stream(round, 50));
    ASSERT_EQ(tiny.attend_and_check(sequence.block_table(), 50, 0, round).exact, 1u);
  }
  await_back(idle.get(), 1);
  EXPECT_EQ(daemon.seen().wrong_tokens, 0u);
  EXPECT_EQ(daemon.seen().sessions, 2u);
}

TEST(Reconnect, SlabThatIsAnnouncedAfterTheReturnIsMapped) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  const std::uint32_t before = 4 * 8;  // pages of the first slabs
  Sequence sequence = tiny.model().open({});
  sequence.reserve((before - 4) * KVQ_PAGE_TOKENS, 5000);
  daemon.crash();
  daemon.start();
  await_back(tiny.get(), 1);
  daemon.add_slab();
  Sequence fresh = tiny.model().open({});
  const auto tokens = token_stream(1, 8 * KVQ_PAGE_TOKENS);
  tiny.write(fresh, 0, tokens);
  EXPECT_GT(fresh.block_table().back(), static_cast<std::int32_t>(before));
  EXPECT_EQ(tiny.attend_and_check(fresh.block_table(), 8 * KVQ_PAGE_TOKENS, 0, test_seed()).exact, 1u);
}

TEST(Reconnect, DaemonThatNeverReturnsCostsNextToNothing) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  daemon.crash();
  await_away(tiny.get());
  const auto used_us = [] {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000 + usage.ru_utime.tv_usec +
           usage.ru_stime.tv_usec;
  };
  const auto before = used_us();
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  EXPECT_LT(used_us() - before, 100'000);
}

#if defined(KVQ_KILL_POINTS)
TEST(Reconnect, EveryKillPointOfTheClientIsReached) {
  static std::atomic<std::uint32_t> reached[kKillPoints];
  kill_point_hook.store([](KillPoint point) { ++reached[static_cast<std::size_t>(point)]; });
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 64);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  check(kvq_credits_request(tiny.get(), 8, 1000));
  Sequence again = tiny.model().open(tokens);
  daemon.crash();
  daemon.start();
  await_back(tiny.get(), 1);
  kill_point_hook.store(nullptr);
  for (std::size_t i = static_cast<std::size_t>(KillPoint::client_credit_popped); i < kKillPoints; ++i) {
    EXPECT_GT(reached[i].load(), 0u) << name(static_cast<KillPoint>(i));
  }
}
#endif

}  // namespace
}  // namespace kvq::test

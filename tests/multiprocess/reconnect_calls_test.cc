// Calls that need the daemon while it is away: they wait for their deadline, are made again, or give up in time.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "kvq/segment.h"
#include "tests/multiprocess/reconnect.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;

TEST(ReconnectCalls, CallWaitsForTheDaemonsReturn) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  daemon.crash();
  await_away(tiny.get());
  std::thread starter([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    daemon.start();
  });
  const auto start = Clock::now();
  EXPECT_EQ(kvq_credits_request(tiny.get(), 10, 20'000), KVQ_OK) << kvq_last_error();
  EXPECT_GE(ms_since(start), 150u);
  starter.join();
}

TEST(ReconnectCalls, CallGivesUpAtItsDeadline) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  daemon.crash();
  await_away(tiny.get());
  auto start = Clock::now();
  EXPECT_EQ(kvq_credits_request(tiny.get(), 10, 300), KVQ_ERR_DAEMON_GONE);
  EXPECT_GE(ms_since(start), 290u);
  EXPECT_LT(ms_since(start), 5000u);
  EXPECT_NE(std::strstr(kvq_last_error(), "is restarting and did not come back within 300 ms"), nullptr)
      << kvq_last_error();
  start = Clock::now();
  EXPECT_EQ(kvq_credits_request(tiny.get(), 10, 0), KVQ_ERR_DAEMON_GONE);
  EXPECT_LT(ms_since(start), 250u);
  EXPECT_NE(std::strstr(kvq_last_error(), "within 0 ms"), nullptr) << kvq_last_error();
  daemon.start();
  EXPECT_EQ(kvq_credits_request(tiny.get(), 10, 20'000), KVQ_OK) << kvq_last_error();
}

TEST(ReconnectCalls, RegistrationWaitsForItsDeadlineToo) {
  FakeDaemon daemon;
  Client client(daemon.socket());
  daemon.crash();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // a client without a model tells nobody that it noticed
  try {
    register_small(client, 200);
    FAIL() << "registered without a daemon";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status(), KVQ_ERR_DAEMON_GONE) << failure.what();
    EXPECT_NE(std::strstr(failure.what(), "restarting"), nullptr) << failure.what();
  }
  daemon.start();
  EXPECT_EQ(kvq_model_close(register_small(client)), KVQ_OK);
}

// Fills the command ring, so that the next command needs a ping.
void fill_ring(TinyModel& tiny) {
  for (std::uint32_t i = 0; i < kCommandSlots / 2; ++i) Sequence passing = tiny.model().open({});
}

void make_call(const std::string& call, TinyModel& tiny, Sequence& parked) {
  if (call == "credits") check(kvq_credits_request(tiny.get(), 10, 20'000));
  if (call == "resume") parked.resume(20'000);
  if (call == "lostPages") {
    std::size_t count = 0;
    std::uint64_t now = 0;
    check(kvq_lost_pages(tiny.get(), 5, nullptr, nullptr, 0, &count, &now));
    EXPECT_EQ(now, 6u);
  }
  if (call == "attach") {
    std::uint64_t cached = 0;
    Sequence sequence = tiny.model().open(token_stream(1, 64), &cached);
    EXPECT_EQ(cached, 64u);
    EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 64, 0, test_seed()).exact, 1u);
  }
  if (call == "ping") {
    fill_ring(tiny);
    Sequence after = tiny.model().open({});
  }
}

TEST(ReconnectCalls, CallInFlightIsMadeAgain) {
  for (const char* call : {"credits", "attach", "resume", "lostPages", "ping"}) {
    for (const bool after : {false, true}) {
      SCOPED_TRACE(std::string(call) + (after ? ", done but not answered" : ", not done"));
      FakeDaemon daemon;
      TinyModel tiny(daemon.socket(), {});
      Sequence sequence = tiny.model().open({}), parked = tiny.model().open({});
      tiny.write(sequence, 0, token_stream(1, 64));
      check(kvq_credits_request(tiny.get(), 4, 1000));  // by then the page is sealed
      parked.park();
      daemon.set({.break_at = call, .break_after = after});
      const std::uint32_t before = daemon.seen().calls[call];
      make_call(call, tiny, parked);
      EXPECT_EQ(daemon.seen().calls[call], before + 2);
      EXPECT_EQ(daemon.seen().resumed, 1u);
      EXPECT_EQ(daemon.seen().attach_repeats, std::string(call) == "attach" && after ? 1u : 0u);
    }
  }
}

TEST(ReconnectCalls, CallThatWasNeverAnsweredIsMadeAgain) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  daemon.set({.hold = "credits"});
  std::thread restarter([&] {
    while (daemon.seen().calls["credits"] == 0) std::this_thread::yield();
    daemon.crash();
    daemon.start();
  });
  EXPECT_EQ(kvq_credits_request(tiny.get(), 10, 20'000), KVQ_OK) << kvq_last_error();
  restarter.join();
}

TEST(ReconnectCalls, AttachThatNobodyAnsweredLeavesNothingBehind) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 64));
  check(kvq_credits_request(tiny.get(), 4, 1000));
  daemon.set({.break_at = "attach", .break_after = true, .back_after_ms = 0});
  const auto tokens = token_stream(1, 64);
  kvq_sequence* attached = nullptr;
  EXPECT_EQ(kvq_sequence_open(tiny.get(), tokens.data(), 64, nullptr, nullptr, &attached), KVQ_ERR_DAEMON_GONE);
  EXPECT_EQ(daemon.seen().sequences, 2u);
  daemon.start();
  await_back(tiny.get(), 1);
  check(kvq_credits_request(tiny.get(), 10, 20'000));
  EXPECT_EQ(daemon.seen().sequences, 1u);
}

TEST(ReconnectCalls, BreakDuringTheResumeIsFollowedByAnother) {
  for (const bool after : {false, true}) {
    FakeDaemon daemon;
    TinyModel tiny(daemon.socket(), {});
    daemon.crash();
    daemon.set({.break_at = "reconnect", .break_after = after});
    daemon.start();
    await_back(tiny.get(), 1);
    EXPECT_EQ(daemon.seen().calls["reconnect"], 2u);
    EXPECT_EQ(kvq_credits_request(tiny.get(), 10, 20'000), KVQ_OK) << kvq_last_error();
  }
}

TEST(ReconnectCalls, RegistrationInFlightIsMadeAgain) {
  for (const char* call : {"register", "directory", "prefixTable", "segment", "doorbell", "notice", "ready"}) {
    for (const bool after : {false, true}) {
      if (after && std::strcmp(call, "register") != 0 && std::strcmp(call, "ready") != 0) continue;
      SCOPED_TRACE(call);
      FakeDaemon daemon;
      daemon.set({.break_at = call, .break_after = after});
      TinyModel tiny(daemon.socket(), {});
      EXPECT_EQ(daemon.seen().calls["register"], 2u);
      Sequence sequence = tiny.model().open({});
      tiny.write(sequence, 0, token_stream(1, 64));
      daemon.crash();
      daemon.start();
      await_back(tiny.get(), 1);
      EXPECT_EQ(daemon.seen().calls["reconnect"], 1u);  // what got nowhere is not resumed
    }
  }
}

TEST(ReconnectCalls, ReleaseIntoAFullRingIsKeptForLater) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  auto held = std::make_unique<Sequence>(tiny.model().open({}));
  held->reserve(64, 1000);
  daemon.crash();
  await_away(tiny.get());
  const auto start = Clock::now();
  for (std::uint32_t i = 2; i < kCommandSlots; i += 2) Sequence passing = tiny.model().open({});
  held.reset();
  EXPECT_LT(ms_since(start), 4000u);  // shorter than any wait for room
  daemon.start();
  await_back(tiny.get(), 1);
  EXPECT_EQ(daemon.seen().sequences, 1u);
  check(kvq_credits_request(tiny.get(), 10, 20'000));
  EXPECT_EQ(daemon.seen().sequences, 0u);
}

TEST(ReconnectCalls, CloseWhileAwayIsShortAndReleasesTheCallsThatWait) {
  for (const bool answering : {false, true}) {
    SCOPED_TRACE(answering ? "a daemon that does not answer the resume" : "no daemon");
    FakeDaemon daemon;
    kvq_sequence* sequence = nullptr;
    kvq_status waiting = KVQ_OK;
    std::thread waiter;
    Clock::time_point start;
    {
      Client client(daemon.socket());
      kvq_model* model = register_small(client);
      check(kvq_sequence_open(model, nullptr, 0, nullptr, nullptr, &sequence));
      daemon.crash();
      await_away(model);
      daemon.set({.hold = "reconnect"});
      if (answering) daemon.start();
      waiter = std::thread([&] { waiting = kvq_reserve(sequence, 100 * KVQ_PAGE_TOKENS, 60'000); });
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // nothing tells that a call waits
      start = Clock::now();
      check(kvq_model_close(model));
      waiter.join();
    }
    EXPECT_LT(ms_since(start), 2000u);
    EXPECT_EQ(waiting, KVQ_ERR_STALE_ID);
    EXPECT_EQ(kvq_sequence_release(sequence), KVQ_OK);
  }
}

}  // namespace
}  // namespace kvq::test

// Many threads in calls of one client while the daemon dies and comes back, again and again.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/multiprocess/reconnect.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

constexpr int kThreads = 4, kRounds = 20, kRestarts = 20;

void serve(TinyModel& tiny, std::uint32_t stream, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    const auto tokens = token_stream(stream, 1 + random() % 60);
    Sequence sequence = tiny.model().open({});
    tiny.write(sequence, 0, tokens, 30'000);
    tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(tokens.size()), 0, random());
    check(kvq_credits_request(tiny.get(), 1 + random() % 6, 30'000));
    sequence.park();
    sequence.resume(30'000);
    tiny.model().pressure();
  }
}

TEST(Threads, CallsOfAllThreadsGoOnThroughRestarts) {
  FakeDaemon daemon;
  TinyModel tiny(daemon.socket(), {});
  std::atomic<int> failures{0}, running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        serve(tiny, static_cast<std::uint32_t>(t), test_seed() + static_cast<std::uint64_t>(t));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "thread %d: %s\n", t, error.what());
        failures.fetch_add(1);
      }
      running.fetch_sub(1);
    });
  }
  int restarts = 0;
  for (; restarts < kRestarts || running.load() != 0; ++restarts) {
    daemon.crash();
    std::this_thread::sleep_for(std::chrono::milliseconds(restarts % 7));
    daemon.start();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  EXPECT_EQ(daemon.seen().wrong_tokens, 0u);
  EXPECT_EQ(daemon.seen().sessions, 1u);
}

}  // namespace
}  // namespace kvq::test

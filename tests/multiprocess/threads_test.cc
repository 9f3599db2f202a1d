// Several threads, one model: each serves sequences of its own through the shared rings.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

constexpr int kThreads = 4, kRounds = 12;

void serve(TinyModel& tiny, std::uint32_t stream, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int round = 0; round < kRounds; ++round) {
    const auto tokens = token_stream(stream, 64 + random() % 200);
    std::uint64_t cached = 0;
    Sequence sequence = tiny.model().open(tokens, &cached);
    const std::vector<std::uint32_t> rest(tokens.begin() + static_cast<std::ptrdiff_t>(cached), tokens.end());
    tiny.write(sequence, cached, rest, 30'000);
    tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(tokens.size()), 0, random());
    Sequence child = sequence.fork(30'000);
    child.truncate(random() % tokens.size(), 30'000);
    const kvq_alias alias{static_cast<std::int32_t>(stream), sequence.block_table()[0]};
    check(kvq_set_aliases(tiny.get(), &alias, 1));
    tiny.model().pressure();
  }
}

TEST(Threads, ServeTheirSequencesThroughOneModel) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      try {
        serve(tiny, static_cast<std::uint32_t>(t % 2), test_seed() + static_cast<std::uint64_t>(t));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "thread %d: %s\n", t, error.what());
        failures.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
}

TEST(Threads, TwoModelsOfOneProcessShareTheMapping) {
  DaemonProcess daemon(calm_settings());
  TinyModel one(daemon.socket(), {});
  ModelOptions options;
  options.fingerprint = 2;
  TinyModel two(daemon.socket(), options);
  Sequence a = one.model().open({}), b = two.model().open({});
  std::thread other([&] { two.write(b, 0, token_stream(2, 100)); });
  one.write(a, 0, token_stream(1, 100));
  other.join();
  one.attend_and_check(a.block_table(), 100, 0, 1);
  one.attend_and_check(b.block_table(), 100, 0, 1);  // the same arena, whoever asks
  EXPECT_EQ(one.model().info().tenant, two.model().info().tenant);
}

}  // namespace
}  // namespace kvq::test

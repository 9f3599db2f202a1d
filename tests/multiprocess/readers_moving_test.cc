// Ten thousand steps of two readers while a writer fills, drops and refills what they read, under pressure that comes
// and goes, so that every page changes its format and its place all the time; and the same with a daemon that is killed
// every second. Each attention result and each byte is checked.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <sstream>
#include <thread>

#include "tests/support/accounts.h"
#include "tests/support/held_daemon.h"
#include "tests/support/page_bytes.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

constexpr std::uint32_t kStreams = 10, kStepsOfEach = 5000, kPatienceMs = 30'000;
constexpr std::size_t kTokens = 6 * KVQ_PAGE_TOKENS;

std::vector<std::uint32_t> stream(std::uint64_t number) {
  return token_stream(static_cast<std::uint32_t>(500 + number % kStreams), kTokens);
}

// Arguments: socket, seed. Attaches what is cached of a stream, reads it for some steps, and lets it go again.
KVQ_ROLE(moving_reader) {
  std::mt19937_64 random(std::stoull(arguments[1]));
  TinyModel tiny(arguments[0], {});
  Seen total;
  Formats pages;
  std::uint64_t misses = 0;
  say("reading");
  while (total.calls < kStepsOfEach) {
    auto tokens = stream(random());
    std::uint64_t cached = 0;
    Sequence sequence = tiny.model().open(tokens, &cached);
    if (cached == 0) {
      ++misses;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until the writer has been there
      continue;
    }
    tokens.resize(cached);
    const auto table = sequence.block_table();
    for (std::uint64_t steps = 1 + random() % 60; steps > 0; --steps) {
      const Seen seen = tiny.attend_and_check(table, static_cast<std::int32_t>(cached),
                                              static_cast<std::uint32_t>(random() % kLayers), random());
      const Formats formats = check_pages(tiny, table, tokens);
      total.calls += seen.calls;
      total.exact += seen.exact;
      total.dense += seen.dense;
      total.mixed += seen.mixed;
      total.quantized += seen.quantized;
      if (total.calls % 100 == 0) say("on");  // so that a silence is noticed
      pages.dense += formats.dense;
      pages.quantized += formats.quantized;
    }
  }
  std::ostringstream line;
  line << total.calls << " steps: " << total.dense << " dense, " << total.mixed << " mixed, " << total.quantized
       << " quantized; in " << total.calls - total.exact << " a page changed during the call; " << pages.dense
       << " dense and " << pages.quantized << " quantized pages compared; " << misses << " misses";
  say(line.str());
  return total.dense > 0 && total.mixed > 0 && total.quantized > 0 ? 0 : 3;
}

// 15 usable slabs of 8 dense or 28 quantized pages; the streams are 60 pages, and the writer holds some of them.
std::string settings() {
  return "arena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\n"
         "quantize_at = 0.3\nevict_at = 0.4\nrefuse_at = 0.97\nrelief = 0.05\nresidual_window_pages = 0\n"
         "[[tenants]]\nname = \"mine\"\nuids = [0]\n";
}

// Writes what is missing of each stream in turn, and passing sequences that make the pressure rise and fall.
void write_until(const std::string& socket, const std::atomic<bool>& done) {
  TinyModel writer(socket, {});
  std::vector<Sequence> ballast;
  for (std::uint32_t round = 0; !done; ++round) {
    const auto tokens = stream(round);
    std::uint64_t cached = 0;
    Sequence sequence = writer.model().open(tokens, &cached);
    const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(cached);
    if (first != tokens.end()) writer.write(sequence, cached, {first, tokens.end()}, kPatienceMs);
    if (round % 40 < 20) {  // rises ...
      kvq_open_options alone{};
      alone.size = sizeof(alone);
      alone.private_pages = alone.format_floor_dense = 1;
      if (ballast.size() < 8) {
        ballast.push_back(writer.model().open({}, nullptr, &alone));
        writer.write(ballast.back(), 0, token_stream(round, 4 * KVQ_PAGE_TOKENS), kPatienceMs);
      }
    } else if (!ballast.empty()) {  // ... and falls
      ballast.pop_back();
    }
  }
}

std::string last_line(RoleProcess& reader) {
  try {
    for (;;) {
      if (const std::string line = reader.hear(); line != "on") return line;
    }
  } catch (const std::exception& error) {
    return error.what();  // its exit code says the rest
  }
}

void read_everything(bool with_deaths) {
  HeldDaemon daemon(settings());
  const Books books(daemon, 1);
  RoleProcess one("moving_reader", {daemon.socket(), std::to_string(test_seed())});
  RoleProcess two("moving_reader", {daemon.socket(), std::to_string(test_seed() + 1)});
  ASSERT_EQ(one.hear(), "reading");
  ASSERT_EQ(two.hear(), "reading");
  std::atomic<bool> done{false};
  std::string writer_failed;
  std::thread writer([&] {
    try {
      write_until(daemon.socket(), done);
    } catch (const std::exception& error) {
      writer_failed = error.what();
    }
  });
  std::thread killer([&] {
    while (with_deaths && !done) {
      for (int i = 0; i < 100 && !done; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      daemon.kill();
    }
  });
  const std::string a = last_line(one), b = last_line(two);
  done = true;
  writer.join();
  killer.join();
  EXPECT_EQ(writer_failed, "");
  std::printf("%s\n%s\n%u lives of kvqd\n", a.c_str(), b.c_str(), daemon.lives());
  EXPECT_EQ(one.wait(), 0) << a;
  EXPECT_EQ(two.wait(), 0) << b;
  EXPECT_GE(daemon.lives(), with_deaths ? 4u : 1u);
  EXPECT_EQ(books.close(), "") << daemon.log();
  EXPECT_EQ(daemon.log().find("adopt_refused"), std::string::npos);
}

TEST(Readers, TenThousandStepsWhileAllPagesMoveAreRight) { read_everything(false); }

TEST(Readers, TenThousandStepsWithADaemonThatDiesEverySecondAreRight) { read_everything(true); }

}  // namespace
}  // namespace kvq::test

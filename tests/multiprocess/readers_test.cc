// Two processes attend without pause while the daemon quantizes and compacts what they read; each result is checked.
#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <utility>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

constexpr std::uint32_t kStreams = 3, kRounds = 16, kBurst = 32;
constexpr std::size_t kTokens = 12 * KVQ_PAGE_TOKENS;

// Reads every stream of each round, first while it is dense, then until all of it is quantized.
KVQ_ROLE(reader) {
  TinyModel tiny(arguments[0], {});
  std::uint64_t seed = std::stoull(arguments[1]);
  Seen total;
  for (std::string line = hear(); line != "end"; line = hear()) {
    const auto first = static_cast<std::uint32_t>(std::stoul(line));
    std::vector<Sequence> open;
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      tiny.await_cached(token_stream(first + s, kTokens), kTokens);
      open.push_back(tiny.model().open(token_stream(first + s, kTokens)));
    }
    bool said = false;
    for (std::set<const Sequence*> left; !said || !left.empty();) {
      left.clear();
      for (Sequence& sequence : open) {
        const Seen seen = tiny.attend_and_check(sequence.block_table(), kTokens,
                                                static_cast<std::uint32_t>(seed % kLayers), seed, kBurst);
        ++seed;
        if (seen.quantized != kBurst) left.insert(&sequence);
        total.calls += seen.calls;
        total.exact += seen.exact;
        total.dense += seen.dense;
        total.mixed += seen.mixed;
        total.quantized += seen.quantized;
      }
      if (!std::exchange(said, true)) say("reading");
    }
    say("read");
  }
  std::ostringstream line;
  line << total.calls << " calls: " << total.dense << " dense, " << total.mixed << " mixed, " << total.quantized
       << " quantized; in " << total.calls - total.exact << " a page changed during the call";
  say(line.str());
  return total.dense > 0 && total.mixed > 0 && total.quantized > 0 ? 0 : 3;
}

TEST(Readers, NeverSeeAWrongResultWhileEveryPageIsQuantizedAndMoved) {
  DaemonProcess daemon(calm_settings() + "residual_window_pages = 0\n");
  TinyModel writer(daemon.socket(), {});
  RawSession admin(daemon.socket());
  RoleProcess one("reader", {daemon.socket(), std::to_string(test_seed())});
  RoleProcess two("reader", {daemon.socket(), std::to_string(test_seed() + 1)});
  for (std::uint32_t round = 0; round < kRounds; ++round) {
    const std::string first = std::to_string(round * kStreams);
    for (std::uint32_t s = 0; s < kStreams; ++s) {
      Sequence written = writer.model().open({});
      writer.write(written, 0, token_stream(round * kStreams + s, kTokens), 30'000);
    }
    one.say(first);
    two.say(first);
    ASSERT_EQ(one.hear(), "reading");
    ASSERT_EQ(two.hear(), "reading");
    admin.set("quantize_at", "0.02");
    // What comes and goes meanwhile leaves holes in the int4 slabs, which compaction closes.
    for (std::uint32_t i = 0; i < 4; ++i) {
      Sequence passing = writer.model().open({});
      writer.write(passing, 0, token_stream(1000 + round * 4 + i, 2 * KVQ_PAGE_TOKENS), 30'000);
    }
    ASSERT_EQ(one.hear(), "read");
    ASSERT_EQ(two.hear(), "read");
    admin.set("quantize_at", "0.97");
  }
  one.say("end");
  two.say("end");
  const std::string a = one.hear(), b = two.hear();
  std::printf("%s\n%s\n", a.c_str(), b.c_str());
  EXPECT_EQ(one.wait(), 0) << a;
  EXPECT_EQ(two.wait(), 0) << b;
}

}  // namespace
}  // namespace kvq::test

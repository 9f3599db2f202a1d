// What operators do to the memory of a real kvqd whose clients hold some of it: the arena grows and shrinks, also over
// a restart; what is cached is dropped, what is sparse becomes compact.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/e2e/process.h"
#include "tests/multiprocess/decoder.h"
#include "tests/support/held_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/scrape.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::size_t kDocument = 128;  // two pages of 32 KiB

// Slabs of 256 KiB.
std::string settings(std::uint64_t arena_mib, const std::string& port = "") {
  return (port.empty() ? "" : "metrics = \"127.0.0.1:" + port + "\"\n") + "arena_bytes = \"" +
         std::to_string(arena_mib) +
         "MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\nquantize_at = 0.7\n"
         "residual_window_pages = 0\n[[tenants]]\nname = \"mine\"\nuids = [0]\n";
}

json kvqctl(const HeldDaemon& daemon, std::vector<std::string> arguments) {
  testing::Directory directory;
  arguments.insert(arguments.begin(), {KVQCTL_PATH, "--socket", daemon.socket()});
  arguments.push_back("--json");
  const testing::Ended ended = testing::run(directory, std::move(arguments));
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  return json::parse(ended.out);
}

json arena_of(const HeldDaemon& daemon) { return json::parse(RawSession(daemon.socket()).status())["arena"]; }

bool shrinks_to(const HeldDaemon& daemon, std::uint64_t bytes, const std::string& port) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (std::chrono::steady_clock::now() < end) {
    const Samples now = scrape(port);
    EXPECT_EQ(sum_of(now, "kvq_memory_bytes"), sum_of(now, "kvq_arena_bytes"));
    if (sum_of(now, "kvq_arena_bytes") == static_cast<double>(bytes)) return arena_of(daemon)["slabs_over"] == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

// Documents that a server holds, parked, so that they are quantized when memory is short.
struct Documents {
  explicit Documents(TinyModel& tiny) : tiny(tiny) {}
  void write(std::uint32_t document) {
    const auto tokens = token_stream(5000 + document, kDocument);
    std::uint64_t cached = 0;
    held.push_back(tiny.model().open(tokens, &cached));
    ASSERT_EQ(cached, 0u);
    tiny.write(held.back(), 0, tokens);
    held.back().park();
  }
  // All that was written is there, byte for byte or as its quantized form.
  void expect_all() {
    for (std::uint32_t document = 1; document <= held.size(); ++document) {
      const auto tokens = token_stream(5000 + document, kDocument);
      EXPECT_EQ(tiny.model().lookup(tokens).cached_tokens, kDocument) << document;
    }
  }
  TinyModel& tiny;
  std::vector<Sequence> held;
};

TEST(Resize, GrowsAndShrinksUnderClientsThatDecode) {
  const std::string port = free_port();
  HeldDaemon daemon(settings(4, port));
  DecoderProcess decoder(daemon.socket(), 9);
  TinyModel tiny(daemon.socket(), {});
  Documents documents(tiny);
  const json grown = kvqctl(daemon, {"resize", "16MiB"});
  EXPECT_EQ(grown["arena_bytes_before"], 4 * kMiB);
  EXPECT_EQ(grown["slabs_over"], 0);
  for (std::uint32_t i = 1; i <= 120; ++i) documents.write(i);  // 7.5 MiB, dense
  EXPECT_GT(arena_of(daemon)["slabs_used"], 16) << "more than there was at the start";
  EXPECT_EQ(arena_of(daemon)["start_bytes"], 4 * kMiB);
  documents.expect_all();
  decoder.decode_for(200);

  const json shrunk = kvqctl(daemon, {"resize", "4MiB"});
  EXPECT_GT(shrunk["slabs_over"], 0);
  EXPECT_TRUE(shrinks_to(daemon, 4 * kMiB, port)) << daemon.log();
  documents.expect_all();
  decoder.decode_for(200);
  EXPECT_EQ(decoder.end(), 0) << daemon.log();
}

TEST(Room, WhatIsCachedIsDroppedAndWhatIsSparseMovesTogether) {
  HeldDaemon daemon(settings(16));
  TinyModel tiny(daemon.socket(), {});
  Documents documents(tiny);
  for (std::uint32_t i = 1; i <= 64; ++i) documents.write(i);  // 16 slabs of 4 documents
  for (std::size_t i = 0; i < 64; ++i) {
    if (i % 4 != 0) documents.held[i] = Sequence();
  }
  const auto await = [&](auto&& done) {
    for (int i = 0; i < 1500 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return done();
  };
  EXPECT_TRUE(await([&] { return kvqctl(daemon, {"evict", "--dry-run"})["pages"] == 96; }));
  EXPECT_EQ(kvqctl(daemon, {"evict", "--idle", "1000000"})["pages"], 0);
  EXPECT_EQ(kvqctl(daemon, {"evict"})["bytes"], 96 * 32768);
  const auto cached = [&] { return kvqctl(daemon, {"tenants"})["tenants"][0]["cached_pages"].get<int>(); };
  EXPECT_TRUE(await([&] { return cached() == 0; }));
  EXPECT_TRUE(await([&] { return kvqctl(daemon, {"compact", "--dry-run"})["slabs"] >= 8; }));  // limbo is over
  const json asked = kvqctl(daemon, {"compact"});
  EXPECT_GE(asked["slabs"], 8) << asked.dump();
  const std::uint64_t before = arena_of(daemon)["slabs_used"];
  const std::uint64_t slabs = asked["slabs"];
  EXPECT_TRUE(await([&] { return arena_of(daemon)["slabs_used"] <= before - slabs; })) << arena_of(daemon).dump();
  for (std::uint32_t i = 1; i <= 64; i += 4) {
    const auto tokens = token_stream(5000 + i, kDocument);
    EXPECT_EQ(tiny.model().lookup(tokens).cached_tokens, kDocument) << i;
    EXPECT_TRUE(tiny.check_dense_bytes(documents.held[i - 1].block_table()[0], 0, tokens.data())) << i;
  }
}

TEST(Resize, LastsOverARestartUntilTheConfigurationSaysOtherwise) {
  const std::string port = free_port();
  HeldDaemon daemon(settings(4, port));
  TinyModel tiny(daemon.socket(), {});
  Documents documents(tiny);
  kvqctl(daemon, {"resize", "16MiB"});
  for (std::uint32_t i = 1; i <= 120; ++i) documents.write(i);
  daemon.kill();
  daemon.await_lives(2);
  EXPECT_EQ(arena_of(daemon)["bytes"], 16 * kMiB) << daemon.log();
  documents.expect_all();
  std::ofstream(daemon.directory() + "/kvqd.toml") << "socket = \"" << daemon.socket() << "\"\n" << settings(5, port);
  daemon.upgrade();
  daemon.await_lives(3);
  EXPECT_EQ(arena_of(daemon)["start_bytes"], 5 * kMiB);
  EXPECT_EQ(arena_of(daemon)["target_bytes"], 5 * kMiB);
  EXPECT_TRUE(shrinks_to(daemon, 5 * kMiB, port)) << daemon.log();
  EXPECT_EQ(daemon.log().find("adopt_refused"), std::string::npos) << daemon.log();
  documents.expect_all();
}

}  // namespace
}  // namespace kvq::test

// kvqd with a GPU worker (one whose memory is memory files) and real clients that decode and check what they read,
// while the worker is killed and stopped, or kvqd and the worker together.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <utility>

#include "tests/e2e/process.h"
#include "tests/multiprocess/decoder.h"
#include "tests/support/accounts.h"
#include "tests/support/daemon_process.h"
#include "tests/support/held_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

std::string settings(const std::string& more = "") {
  return "device = \"cuda\"\n--gpu-worker=" FAKE_GPU_WORKER_PATH
         "\n--worker-deadline-ms=200\narena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\n"
         "quantize_at = 0.1\nevict_at = 0.8\nrefuse_at = 0.95\nrelief = 0.02\n"
         "residual_window_pages = 1\n" +
         more + "[[tenants]]\nname = \"mine\"\nuids = [0]\n";
}

// A zombie has nothing open any more; who reaps it is the machine's affair.
bool runs(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string pid, name, state;
  return file >> pid >> name >> state && state != "Z" && state != "X";
}

void pause_ms(std::uint32_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

json status_of(const HeldDaemon& daemon) { return json::parse(RawSession(daemon.socket()).status()); }

bool becomes_well(const HeldDaemon& daemon) {
  for (const auto end = Clock::now() + std::chrono::seconds(30); Clock::now() < end; pause_ms(20)) {
    if (status_of(daemon)["device_health"]["state"] == "ok") return true;
  }
  return false;
}

TEST(GpuWorker, ClientsDecodeWhileItDiesAndHangsAgainAndAgain) {
  HeldDaemon daemon(settings(), {"KVQ_FAKE_GPU=slow_us=200,slow_writes_us=300"});
  const Books books(daemon, 1, true);
  DecoderProcess one(daemon.socket(), 1), two(daemon.socket(), 2);
  for (int death = 0; death < 4; ++death) {
    one.decode_for(400);
    const std::uint64_t before = status_of(daemon)["device_health"]["worker_restarts"];
    const pid_t worker = worker_of(daemon.pid());
    ASSERT_GT(worker, 0);
    ::kill(worker, death % 2 == 0 ? SIGKILL : SIGSTOP);
    const auto end = Clock::now() + std::chrono::seconds(30);
    while (status_of(daemon)["device_health"]["worker_restarts"] == before) {
      ASSERT_LT(Clock::now(), end) << daemon.log();
      pause_ms(10);
    }
  }
  ASSERT_TRUE(becomes_well(daemon));
  one.report();
  two.report();
  one.decode_for(1500);
  const DecoderReport first = one.report(), second = two.report();
  std::printf("%s\n%s\n", first.text().c_str(), second.text().c_str());
  EXPECT_GT(first.turns, 0u) << daemon.log();
  EXPECT_GT(second.turns, 0u) << daemon.log();
  EXPECT_GT(status_of(daemon)["transcodes"]["done"], 0u);
  EXPECT_EQ(one.end(), 0) << daemon.log();
  EXPECT_EQ(two.end(), 0) << daemon.log();
  EXPECT_EQ(daemon.lives(), 1u) << "kvqd itself never ended";
  EXPECT_EQ(books.close(), "") << daemon.log();
}

// A worker may let transcodes wait for the sake of those who compute on its GPU, but not when somebody waits for room.
TEST(GpuWorker, AServerThatWaitsForRoomDoesNotWaitForItsPace) {
  HeldDaemon daemon(settings(), {"KVQ_FAKE_GPU=paced=1"});
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  constexpr std::uint64_t kPiece = 8 * KVQ_PAGE_TOKENS, kTokens = 20 * kPiece;  // 160 pages; the arena has room for 120
  const std::vector<std::uint32_t> tokens = token_stream(1, kTokens);
  EXPECT_NE(daemon.log().find(" mps=no "), std::string::npos) << daemon.log();
  bool rested = false;
  for (std::uint64_t at = 0; at < kTokens; at += kPiece) {
    const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(at);
    tiny.write(sequence, at, {first, first + kPiece}, 20'000);
    if (rested || status_of(daemon)["transcodes"]["in_flight"] == 0u) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const nlohmann::json now = status_of(daemon)["transcodes"];
    rested = now["in_flight"] > 0u && now["done"] == 0u;
  }
  EXPECT_TRUE(rested) << "memory was short, and nobody waited";
  // What was begun for the last piece comes to its end; then nothing moves, since nobody waits.
  std::uint64_t before = 0, done = status_of(daemon)["transcodes"]["done"];
  for (int i = 0; i < 100 && done != before; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    before = std::exchange(done, status_of(daemon)["transcodes"]["done"].get<std::uint64_t>());
  }
  EXPECT_GT(done, 0u);
  const Seen seen = tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(kTokens), 0, 1);
  EXPECT_EQ(seen.calls, 1u);
}

TEST(GpuWorker, ItsPagesOutliveKvqdAndItself) {
  HeldDaemon daemon(settings());
  const Books books(daemon, 1, true);
  DecoderProcess decoder(daemon.socket(), 1);
  for (std::uint32_t life = 1; life < 5; ++life) {
    decoder.decode_for(500);
    const pid_t worker = worker_of(daemon.pid());
    if (life % 2 == 0) ::kill(worker, SIGSTOP);  // it cannot end by itself when its socket does
    daemon.kill();
    daemon.await_lives(life + 1);
    const pid_t next = worker_of(daemon.pid());
    EXPECT_GT(next, 0);
    EXPECT_NE(next, worker);
    EXPECT_FALSE(runs(worker)) << "the earlier worker";
  }
  decoder.report();
  decoder.decode_for(1000);
  EXPECT_GT(decoder.report().turns, 0u) << daemon.log();
  EXPECT_EQ(decoder.end(), 0) << daemon.log();
  EXPECT_EQ(daemon.log().find("adopt_refused"), std::string::npos) << daemon.log();
  EXPECT_EQ(books.close(), "") << daemon.log();
}

// Spares of a legacy worker are bound to their places, which come and go all the while under this pressure.
TEST(GpuWorker, ClientsDecodeOverALegacyOne) {
  HeldDaemon daemon(settings("gpu_export = \"legacy\"\n"));
  EXPECT_NE(daemon.log().find("passes its memory on by legacy handles"), std::string::npos) << daemon.log();
  EXPECT_EQ(status_of(daemon)["device_health"]["export"], "legacy");
  const Books books(daemon, 1, true);
  DecoderProcess one(daemon.socket(), 1), two(daemon.socket(), 2);
  one.decode_for(3000);
  EXPECT_GT(one.report().turns, 0u) << daemon.log();
  EXPECT_GT(two.report().turns, 0u) << daemon.log();
  EXPECT_GT(status_of(daemon)["transcodes"]["done"], 0u);
  EXPECT_EQ(one.end(), 0) << daemon.log();
  EXPECT_EQ(two.end(), 0) << daemon.log();
  EXPECT_EQ(daemon.lives(), 1u);
  EXPECT_EQ(books.close(), "") << daemon.log();
}

// Arguments: socket. Writes a prefix, says so, and then says how its next request that needs the daemon ends.
KVQ_ROLE(bereaved) {
  TinyModel tiny(arguments[0], {});
  const auto tokens = token_stream(7, 128);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens, 20'000);
  tiny.await_cached(tokens, 128);
  say("written");
  hear();
  for (;;) {  // until then it goes on with what it has
    const kvq_status status = kvq_credits_request(tiny.get(), 1, 30'000);
    if (status == KVQ_OK) continue;
    say(std::to_string(status));
    return 0;
  }
}

std::string exits_of(const HeldDaemon& daemon) {
  std::string out;
  std::istringstream log(daemon.log());
  for (std::string line; std::getline(log, line);) {
    if (line.find("died") != std::string::npos) out += line.substr(line.find("died")) + "\n";
  }
  return out;
}

TEST(GpuWorker, PagesOfALegacyOneEndWithItAndKvqdStartsClean) {
  HeldDaemon daemon(settings("gpu_export = \"legacy\"\n"));
  RoleProcess client("bereaved", {daemon.socket()});
  ASSERT_EQ(client.hear(), "written");
  ::kill(worker_of(daemon.pid()), SIGKILL);
  daemon.await_lives(2);
  client.say("go");
  EXPECT_EQ(client.hear(), std::to_string(KVQ_ERR_DAEMON_GONE)) << "its session is lost, by a typed error";
  EXPECT_EQ(client.wait(), 0);
  EXPECT_NE(exits_of(daemon).find("exit code 6"), std::string::npos) << daemon.log();
  const std::string log = daemon.log();
  EXPECT_NE(log.find("event=gpu_pages_lost"), std::string::npos) << log;
  EXPECT_NE(log.find("why=\"the GPU worker ended: it ended by itself with signal 9\""), std::string::npos) << log;
  const json status = status_of(daemon);
  EXPECT_EQ(status["adopt"]["refused"], "the GPU's memory is passed on by legacy handles and ended with its worker");
  EXPECT_EQ(status["sessions"], 0);
  DecoderProcess next(daemon.socket(), 1);
  next.decode_for(300);
  EXPECT_GT(next.report().turns, 0u);
  EXPECT_EQ(next.end(), 0);
}

TEST(GpuWorker, WhatALegacyKvqdLeavesIsRefused) {
  HeldDaemon daemon(settings("gpu_export = \"legacy\"\n"));
  RoleProcess client("bereaved", {daemon.socket()});
  ASSERT_EQ(client.hear(), "written");
  daemon.kill();
  daemon.await_lives(2);
  EXPECT_NE(daemon.log().find("event=adopt_refused"), std::string::npos) << daemon.log();
  client.say("go");
  EXPECT_EQ(client.hear(), std::to_string(KVQ_ERR_DAEMON_GONE));
  EXPECT_EQ(client.wait(), 0);
}

TEST(GpuWorker, ALegacyKvqdThatIsToldToEndLeavesNothing) {
  HeldDaemon daemon(settings("gpu_export = \"legacy\"\n"));
  RoleProcess client("bereaved", {daemon.socket()});
  ASSERT_EQ(client.hear(), "written");
  daemon.upgrade();
  daemon.await_lives(2);
  const json adopt = status_of(daemon)["adopt"];
  EXPECT_EQ(adopt["adopted"], false);
  EXPECT_EQ(adopt["refused"], "");
  client.say("go");
  EXPECT_EQ(client.hear(), std::to_string(KVQ_ERR_DAEMON_GONE));
  EXPECT_EQ(client.wait(), 0);
}

TEST(GpuWorker, AutoTakesLegacyHandlesOnlyWhereDescriptorsCannotPass) {
  const auto exporter = [](const std::string& asked, const std::string& faults) {
    const HeldDaemon daemon(settings("gpu_export = \"" + asked + "\"\n"), {"KVQ_FAKE_GPU=" + faults});
    return status_of(daemon)["device_health"]["export"].get<std::string>();
  };
  EXPECT_EQ(exporter("auto", ""), "vmm");
  EXPECT_EQ(exporter("auto", "no_vmm=1"), "legacy");
  EXPECT_EQ(exporter("legacy", ""), "legacy");
  EXPECT_THROW(exporter("vmm", "no_vmm=1"), std::runtime_error);
}

testing::Ended resize(const HeldDaemon& daemon, const std::string& size) {
  const testing::Directory directory;
  return testing::run(directory, {KVQCTL_PATH, "--socket", daemon.socket(), "resize", size});
}

TEST(GpuWorker, TheArenaGrowsAndShrinksUnderClientsAndOverTheDeathOfItsWorker) {
  constexpr std::uint64_t kMiB = 1 << 20;
  HeldDaemon daemon(settings());
  DecoderProcess one(daemon.socket(), 1);
  one.decode_for(300);
  const std::uint64_t held = status_of(daemon)["device_health"]["held_bytes"];  // slabs and the mirror
  const auto holds = [&](std::uint64_t bytes) {
    const auto end = Clock::now() + std::chrono::seconds(30);
    while (Clock::now() < end && status_of(daemon)["device_health"]["held_bytes"] != bytes) pause_ms(20);
    return status_of(daemon)["device_health"]["held_bytes"] == bytes;
  };
  EXPECT_EQ(resize(daemon, "12MiB").exit_code, 0);
  EXPECT_TRUE(holds(held + 8 * kMiB)) << daemon.log();
  ::kill(worker_of(daemon.pid()), SIGKILL);
  one.decode_for(300);
  ASSERT_TRUE(becomes_well(daemon));
  EXPECT_TRUE(holds(held + 8 * kMiB)) << daemon.log();
  EXPECT_EQ(resize(daemon, "2MiB").exit_code, 0);
  one.decode_for(300);
  EXPECT_TRUE(holds(held - 2 * kMiB)) << status_of(daemon)["arena"].dump();
  EXPECT_EQ(status_of(daemon)["arena"]["slabs_over"], 0);
  daemon.kill();
  daemon.await_lives(2);
  EXPECT_TRUE(holds(held - 2 * kMiB)) << status_of(daemon)["arena"].dump();
  EXPECT_EQ(status_of(daemon)["arena"]["bytes"], 2 * kMiB);
  one.decode_for(300);
  EXPECT_EQ(one.end(), 0) << daemon.log();
}

TEST(GpuWorker, ALegacyArenaIsNotResized) {
  const HeldDaemon daemon(settings("gpu_export = \"legacy\"\n"));
  const testing::Ended ended = resize(daemon, "8MiB");
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_NE(ended.err.find("one allocation of 4MiB"), std::string::npos) << ended.err;
  EXPECT_EQ(status_of(daemon)["arena"]["bytes"], 4 << 20);
  EXPECT_EQ(status_of(daemon)["arena"]["most_bytes"], 4 << 20);
}

// The best of several, since other programs run here, too: a kvqd that waits for its worker would be late each time.
TEST(GpuWorker, KvqctlIsAnsweredWhileItStandsStill) {
  const testing::Directory directory;
  HeldDaemon daemon("device = \"cuda\"\n--gpu-worker=" FAKE_GPU_WORKER_PATH
                    "\n--worker-deadline-ms=20000\narena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\n"
                    "max_pages = 1024\n");
  const pid_t worker = worker_of(daemon.pid());
  ASSERT_GT(worker, 0);
  ::kill(worker, SIGSTOP);
  auto best = Clock::duration::max();
  for (int i = 0; i < 5; ++i) {
    const auto begin = Clock::now();
    const testing::Ended ended = testing::run(directory, {KVQCTL_PATH, "--socket", daemon.socket(), "status"});
    best = std::min(best, Clock::now() - begin);
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_NE(ended.out.find("worker restarts"), std::string::npos) << ended.out;
  }
  EXPECT_LT(best, std::chrono::milliseconds(250));
  ::kill(worker, SIGKILL);
}

TEST(GpuWorker, KvqdSaysWhatItServesAndWhyNot) {
  const testing::Directory directory;
  const auto start = [&](const std::string& device, const std::string& program, const std::string& faults) {
    return testing::run(directory,
                        {KVQD_PATH, "--socket", directory.file("s"), "--device", device, "--gpu-worker", program,
                         "--arena-bytes", "4MiB", "--slab-bytes", "1MiB", "--max-pages", "64"},
                        {"KVQ_FAKE_GPU=" + faults});
  };
  testing::Ended ended = start("cuda", "/nowhere/kvqd-gpu", "");
  EXPECT_EQ(ended.exit_code, 4) << ended.err;
  EXPECT_NE(ended.err.find("device = cuda: /nowhere/kvqd-gpu cannot be started: No such file or directory; install "
                           "kvqd-gpu, or give its path with --gpu-worker"),
            std::string::npos)
      << ended.err;
  ended = start("GPU-12", FAKE_GPU_WORKER_PATH, "");
  EXPECT_NE(ended.err.find("GPU GPU-12 is not here, the worker found GPU-0000"), std::string::npos) << ended.err;
  ended = start("cuda", FAKE_GPU_WORKER_PATH, "slabs=1");
  EXPECT_NE(ended.err.find("1 of 4 slabs"), std::string::npos) << ended.err;
  const testing::Daemon fallback(directory, {"--device", "auto", "--gpu-worker", FAKE_GPU_WORKER_PATH},
                                 {"KVQ_FAKE_GPU=no_gpu=no driver here"});
  EXPECT_NE(fallback.process->err().find("event=device device=host why=\"" FAKE_GPU_WORKER_PATH
                                         " finds no GPU to work with: no driver here\""),
            std::string::npos)
      << fallback.process->err();
}

}  // namespace
}  // namespace kvq::test

// The metrics of a real kvqd: each counter moves by what was done and nothing else does, and the bytes sum to the arena
// whatever happens.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "tests/multiprocess/decoder.h"
#include "tests/support/daemon_process.h"
#include "tests/support/held_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/scrape.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr double kDensePage = 32768;

std::string with_metrics(const std::string& settings, const std::string& port) {
  return "metrics = \"127.0.0.1:" + port + "\"\n" + settings;
}

std::string host(const std::string& family, const std::string& more = "") {
  return family + "{device=\"host\"" + (more.empty() ? "" : "," + more) + "}";
}
std::string mine(const std::string& family, const std::string& more = "") {
  return host(family, "tenant=\"mine\"" + (more.empty() ? "" : "," + more));
}
const std::string kMine = "[[tenants]]\nname = \"mine\"\nuids = [" + std::to_string(::geteuid()) + "]\n";

// What moved since `before`, once it is `expected`; after ten seconds, whatever moved.
Samples moved_to(const std::string& port, Samples& before, const Samples& expected) {
  Samples got;
  for (const auto end = Clock::now() + std::chrono::seconds(10); Clock::now() < end;) {
    const Samples now = scrape(port);
    got = moved(before, now);
    if (got == expected) {
      before = now;
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the text is as old as that
  }
  return got;
}

void await_sample(const std::string& port, const std::string& name, double value) {
  const auto end = Clock::now() + std::chrono::seconds(30);
  while (scrape(port).at(name) != value) {
    if (Clock::now() > end) throw std::runtime_error("still waiting for " + name + " = " + std::to_string(value));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

// Arguments: socket. Opens a session and holds it until it is told to close it, or killed.
KVQ_ROLE(metered) {
  {
    TinyModel tiny(arguments[0], {});
    say("open");
    hear();
  }
  say("closed");
  hear();
  return 0;
}

TEST(Metrics, SessionsAreCountedByTheirEnds) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(calm_settings() + kMine, port));
  Samples before = scrape(port);
  RoleProcess first("metered", {daemon.socket()}), second("metered", {daemon.socket()});
  first.hear();
  second.hear();
  await_sample(port, mine("kvq_tenant_pages", "format=\"dense\""), 8);  // 4 unused ones in each magazine
  Samples expected = {{host("kvq_sessions_opened_total"), 2}, {host("kvq_slabs_created_total"), 1}};
  EXPECT_EQ(moved_to(port, before, expected), expected);
  first.say("close");
  first.hear();
  // Its unused pages go back, through limbo.
  expected = {{host("kvq_sessions_ended_total", "how=\"closed\""), 1}, {host("kvq_grace_period_seconds_count"), 4}};
  EXPECT_EQ(moved_to(port, before, expected), expected);
  second.kill();
  // Then their slab is empty, and goes, too, after a while.
  expected = {{host("kvq_sessions_ended_total", "how=\"lost\""), 1},
              {host("kvq_grace_period_seconds_count"), 4},
              {host("kvq_slabs_destroyed_total"), 1}};
  EXPECT_EQ(moved_to(port, before, expected), expected) << daemon.log();
}

TEST(Metrics, PagesAreCountedFromTheirTokensToTheirQuantizing) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(calm_settings() + "residual_window_pages = 0\n" + kMine, port));
  ModelOptions one;
  one.credits = 1;
  TinyModel tiny(daemon.socket(), one);
  RawSession operator_(daemon.socket());
  await_sample(port, mine("kvq_tenant_pages", "format=\"dense\""), 1);  // in its magazine
  Samples before = scrape(port);
  const auto tokens = token_stream(1, 3 * 64 + 10);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  Samples expected = {{host("kvq_alloc_wait_seconds_count"), 1}, {mine("kvq_sealed_tokens_total"), 3 * 64}};
  EXPECT_EQ(moved_to(port, before, expected), expected) << daemon.log();

  Sequence other = tiny.model().open(tokens);
  expected = {{mine("kvq_prefix_attaches_total"), 1},
              {mine("kvq_prefix_hits_total"), 1},
              {mine("kvq_prefix_hit_tokens_total", "format=\"dense\""), 3 * 64}};
  EXPECT_EQ(moved_to(port, before, expected), expected);
  other = Sequence();
  sequence = Sequence();
  await_sample(port, mine("kvq_tenant_cached_pages"), 3);
  before = scrape(port);

  operator_.quantize();
  expected = {{host("kvq_transcodes_total", "from=\"dense\",to=\"int4\""), 3},
              {host("kvq_transcode_seconds_count"), 3},
              {host("kvq_grace_period_seconds_count"), 3},
              {host("kvq_quantization_noise_ratio_count", "layer=\"0\""), 1},
              {host("kvq_transcode_written_bytes_total"), 3 * 9216},
              {host("kvq_slabs_created_total"), 1}};
  const Samples quantized = moved_to(port, before, expected);
  EXPECT_EQ(quantized, expected);
  other = tiny.model().open(tokens);
  expected = {{mine("kvq_prefix_attaches_total"), 1},
              {mine("kvq_prefix_hits_total"), 1},
              {mine("kvq_prefix_hit_tokens_total", "format=\"int4\""), 3 * 64}};
  const Samples attached = moved_to(port, before, expected);
  for (const auto& [name, value] : expected) EXPECT_EQ(attached.at(name), value) << name;
}

TEST(Metrics, WaitsRefusalsAndEvictionsAreCounted) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(calm_settings() + kMine, port));
  ModelOptions options;
  options.floor_dense = true;
  options.credits = 1;
  TinyModel tiny(daemon.socket(), options);
  Sequence all = tiny.model().open({});
  std::uint64_t pages = 0;
  while (kvq_reserve(all.get(), (pages + 8) * KVQ_PAGE_TOKENS, 1000) == KVQ_OK) pages += 8;
  const double waited = scrape(port).at(host("kvq_alloc_wait_seconds_sum"));
  Samples before = scrape(port);
  Sequence more = tiny.model().open({});
  ASSERT_EQ(kvq_reserve(more.get(), 64 * KVQ_PAGE_TOKENS, 300), KVQ_ERR_NO_MEMORY);
  const Samples expected = {{host("kvq_refusals_total"), 1},
                            {mine("kvq_tenant_refusals_total"), 1},
                            {host("kvq_alloc_wait_seconds_count"), 1}};
  EXPECT_EQ(moved_to(port, before, expected), expected);
  EXPECT_NEAR(scrape(port).at(host("kvq_alloc_wait_seconds_sum")) - waited, 0.3, 0.25);

  // Cached pages are dropped for a request that needs their room, each counted.
  all = Sequence();
  Sequence cached = tiny.model().open({});
  tiny.write(cached, 0, token_stream(3, 8 * 64));
  cached = Sequence();
  await_sample(port, mine("kvq_tenant_cached_pages"), 8);
  std::uint64_t held = 0;
  Sequence greedy = tiny.model().open({});
  while (kvq_reserve(greedy.get(), (held + 8) * KVQ_PAGE_TOKENS, 2000) == KVQ_OK) held += 8;
  EXPECT_EQ(held, pages);
  EXPECT_EQ(scrape(port).at(host("kvq_evicted_pages_total")), 8);
}

TEST(Metrics, AParkedSequenceThatRunsAgainIsCounted) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(calm_settings() + kMine, port));
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 128));
  await_sample(port, mine("kvq_sealed_tokens_total"), 128);
  Samples before = scrape(port);
  sequence.park();
  sequence.resume(1000);
  const Samples expected = {{host("kvq_restore_seconds_count"), 1}};
  EXPECT_EQ(moved_to(port, before, expected), expected) << daemon.log();
}

TEST(Metrics, AnOperatorsEvictionIsAnEndOfItsOwn) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(calm_settings() + kMine, port));
  TinyModel tiny(daemon.socket(), {});
  Samples before = scrape(port);
  const std::string command = std::string(KVQCTL_PATH) + " --socket " + daemon.socket() + " evict-session 1";
  ASSERT_EQ(std::system((command + " > /dev/null").c_str()), 0);
  await_sample(port, host("kvq_sessions_ended_total", "how=\"evicted\""), 1);
  EXPECT_EQ(moved(before, scrape(port)).count(host("kvq_sessions_ended_total", "how=\"lost\"")), 0u);
}

TEST(Metrics, AnOpenStepIsSeenAndCountedByItsAge) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(calm_settings() + kMine, port));
  TinyModel tiny(daemon.socket(), {});
  EXPECT_EQ(scrape(port).at(host("kvq_oldest_step_seconds")), 0);
  const std::string above = host("kvq_step_seconds_bucket", "le=\"0.1\""), all = host("kvq_step_seconds_count");
  {
    const Step step(tiny.model());
    const auto end = Clock::now() + std::chrono::seconds(30);
    while (scrape(port).at(host("kvq_oldest_step_seconds")) < 0.2) ASSERT_LT(Clock::now(), end);
  }
  await_sample(port, all, 1);
  const Samples after = scrape(port);
  EXPECT_EQ(after.at(above), 0) << "it was open for longer";
  EXPECT_GE(after.at(host("kvq_step_seconds_sum")), 0.2);
  EXPECT_EQ(after.at(host("kvq_oldest_step_seconds")), 0);
}

std::string under_pressure() {
  return "arena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\nquantize_at = 0.1\n"
         "evict_at = 0.8\nrefuse_at = 0.95\nrelief = 0.02\nresidual_window_pages = 1\n" +
         kMine;
}

// What holds in every text, however much goes on: nothing falls, and every byte is somewhere, once.
void check_sums(const Samples& now, const Samples& earlier) {
  EXPECT_EQ(sum_of(now, "kvq_memory_bytes"), now.at(host("kvq_arena_bytes")));
  EXPECT_EQ(sum_of(now, "kvq_tenant_memory_bytes") + now.at(host("kvq_memory_bytes", "kind=\"reserve\"")) +
                now.at(host("kvq_memory_bytes", "kind=\"free\"")),
            now.at(host("kvq_arena_bytes")));
  EXPECT_EQ(now.at(mine("kvq_tenant_pages", "format=\"dense\"")) * kDensePage,
            now.at(host("kvq_memory_bytes", "kind=\"dense\"")));
  for (const auto& [name, delta] : moved(earlier, now)) EXPECT_GT(delta, 0) << name;
}

TEST(Metrics, TheBytesSumToTheArenaUnderLoad) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(under_pressure(), port));
  DecoderProcess one(daemon.socket(), 1), two(daemon.socket(), 2);
  Samples earlier = scrape(port);
  std::size_t different = 0;
  for (const auto end = Clock::now() + std::chrono::seconds(4); Clock::now() < end;) {
    const Samples now = scrape(port);
    check_sums(now, earlier);
    different +=
        now.at(host("kvq_memory_bytes", "kind=\"int4\"")) != earlier.at(host("kvq_memory_bytes", "kind=\"int4\""));
    earlier = now;
  }
  EXPECT_EQ(one.end(), 0);
  EXPECT_EQ(two.end(), 0);
  EXPECT_GT(different, 3u) << "there was no load";
  EXPECT_GT(sum_of(earlier, "kvq_transcodes_total"), 0);
  // Two sources would differ: this one is kvqctl's.
  const json status = json::parse(RawSession(daemon.socket()).status());
  const Samples last = scrape(port);
  EXPECT_EQ(status["transcodes"]["done"], sum_of(last, "kvq_transcodes_total"));
  EXPECT_EQ(status["dropped_pages"], last.at(host("kvq_evicted_pages_total")));
}

TEST(Metrics, TwoScrapersAndOneThatDoesNotReadDoNotDisturb) {
  const std::string port = free_port();
  DaemonProcess daemon(with_metrics(under_pressure(), port));
  DecoderProcess decoder(daemon.socket(), 1);
  std::vector<int> idle;
  for (int i = 0; i < 8; ++i) {
    idle.push_back(connect_metrics(port));
    const std::string get = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    for (int n = 0; n < 200; ++n) (void)!::send(idle.back(), get.data(), get.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  std::atomic<int> scrapes = 0;
  const auto scrape_often = [&] {
    for (int i = 0; i < 200; ++i) scrapes += scrape(port).count(host("kvq_arena_bytes")) == 1;
  };
  std::thread first(scrape_often), second(scrape_often);
  first.join();
  second.join();
  EXPECT_EQ(scrapes, 400);
  const DecoderReport report = decoder.report();
  EXPECT_GT(report.turns, 0u);
  EXPECT_EQ(decoder.end(), 0) << daemon.log();
  for (const int fd : idle) ::close(fd);
}

TEST(Metrics, ARestartKeepsThePortAndStartsTheCountersAnew) {
  const std::string port = free_port();
  HeldDaemon daemon(with_metrics(calm_settings() + kMine, port));
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 128));
  EXPECT_EQ(scrape(port).at(host("kvq_adopted")), 0);
  EXPECT_GT(scrape(port).at(host("kvq_sessions_opened_total")), 0);
  for (std::uint32_t life = 2; life < 4; ++life) {
    daemon.kill();
    daemon.await_lives(life);
    const Samples now = scrape(port);
    EXPECT_EQ(now.at(host("kvq_adopted")), 1) << daemon.log();
    EXPECT_EQ(now.at(host("kvq_sessions_opened_total")), 0);
    EXPECT_EQ(now.at(host("kvq_sessions")), 1);
    EXPECT_EQ(sum_of(now, "kvq_memory_bytes"), now.at(host("kvq_arena_bytes")));
  }
  tiny.write(sequence, 128, token_stream(2, 64));
}

// Binds `port` as soon as nobody has it.
int squat(const std::string& port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoul(port)));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
  while (::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 || ::listen(fd, 1) != 0) {
    std::this_thread::yield();
  }
  return fd;
}

TEST(Metrics, ATakenPortCostsTheNextKvqdItsMetricsAndNotThePages) {
  const std::string port = free_port();
  HeldDaemon daemon(with_metrics(calm_settings() + kMine, port));
  TinyModel tiny(daemon.socket(), {});
  ::kill(daemon.holder(), SIGSTOP);
  daemon.kill();
  const int squatter = squat(port);
  ::kill(daemon.holder(), SIGCONT);
  daemon.await_lives(2);
  EXPECT_EQ(json::parse(RawSession(daemon.socket()).status())["adopt"]["adopted"], true) << daemon.log();
  EXPECT_NE(daemon.log().find("event=metrics_off why=\"metrics on 127.0.0.1:" + port), std::string::npos)
      << daemon.log();
  ::close(squatter);
  daemon.kill();
  daemon.await_lives(3);
  EXPECT_EQ(scrape(port).at(host("kvq_adopted")), 1) << "the port is free again";
}

TEST(Metrics, ATenantsSeriesEndWithIt) {
  const std::string port = free_port();
  const std::string other = "[[tenants]]\nname = \"other\"\nuids = [4000000]\n";
  HeldDaemon daemon(with_metrics(calm_settings() + kMine + other, port));
  EXPECT_GT(scrape(port).count(host("kvq_tenant_sessions", "tenant=\"other\"")), 0u);
  const std::string path = daemon.directory() + "/kvqd.toml";
  std::ofstream(path) << "socket = \"" << daemon.socket() << "\"\n" << with_metrics(calm_settings() + kMine, port);
  daemon.upgrade();
  daemon.await_lives(2);
  const Samples now = scrape(port);
  EXPECT_EQ(now.at(host("kvq_adopted")), 1) << daemon.log();
  EXPECT_EQ(sum_of(now, "kvq_tenant_quota_bytes"), now.at(host("kvq_arena_bytes"))) << "one tenant is left";
  for (const auto& [name, value] : now) EXPECT_EQ(name.find("tenant=\"other\""), std::string::npos) << name;
}

TEST(Metrics, AUnixSocketServesThemToo) {
  const std::string path = "/tmp/kvq-metrics-" + std::to_string(::getpid()) + ".sock";
  DaemonProcess daemon("metrics = \"unix:" + path + "\"\n" + calm_settings() + kMine);
  EXPECT_EQ(scrape("unix:" + path).at(host("kvq_arena_bytes")), 4 << 20);
  EXPECT_EQ(http_get("unix:" + path, "/").status, 404);
  daemon.stop(SIGTERM);
  EXPECT_NE(::access(path.c_str(), F_OK), 0);
  ::unlink((path + ".lock").c_str());
}

// Inodes of the TCP sockets of this machine, and of all sockets of `process`.
std::size_t tcp_sockets_of(pid_t process) {
  std::string tcp;
  for (const char* file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ostringstream text;
    text << std::ifstream(file).rdbuf();
    tcp += text.str();
  }
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry, gone).string();
    if (!target.starts_with("socket:[")) continue;
    count += tcp.find(" " + target.substr(8, target.size() - 9) + " ") != std::string::npos;
  }
  return count;
}

TEST(Metrics, TheyAreOffByDefaultAndOnLoopbackAlone) {
  const DaemonProcess off(calm_settings());
  EXPECT_EQ(tcp_sockets_of(off.pid()), 0u);
  const DaemonProcess on(with_metrics(calm_settings(), free_port()));
  EXPECT_EQ(tcp_sockets_of(on.pid()), 1u);
}

}  // namespace
}  // namespace kvq::test

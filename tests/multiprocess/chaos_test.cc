// Chaos: servers of two tenants share one small arena, and anything may die or stand still at any time. KVQ_TEST_SEED
// repeats the draws, KVQ_CHAOS_SECONDS says for how long (tools/chaos).
//
// Invariant: no server ever sees a wrong byte or an error that nothing explains, and in the end nothing is charged,
// kept or open any more.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

#include "kvq/kill_point.h"
#include "tests/support/accounts.h"
#include "tests/support/held_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kServers = 4;
constexpr uid_t kOtherUser = 65534;

std::string settings() {
  return "arena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\n"
         "quantize_at = 0.3\nevict_at = 0.5\nrefuse_at = 0.95\nrelief = 0.05\nresidual_window_pages = 1\n"
         "[[tenants]]\nname = \"mine\"\nuids = [0]\n[[tenants]]\nname = \"theirs\"\nuids = [65534]\n";
}

bool of_client(KillPoint point) { return std::string(name(point)).rfind("client_", 0) == 0; }

class Chaos : public ::testing::Test {
 protected:
  struct Server {
    std::unique_ptr<RoleProcess> process;
    bool may_die = false;            // by its own plan
    Clock::time_point goes_on = {};  // it stands still until then; zero: it runs
  };

  Chaos() : random_(test_seed()), daemon_(settings()), books_(daemon_, 2), servers_(kServers) {
    ::chmod(daemon_.socket().c_str(), 0666);
    for (std::size_t i = 0; i < kServers; ++i) start(i, false);
  }

  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  KillPoint point(bool client) {
    for (;;) {
      const auto drawn = static_cast<KillPoint>(below(kKillPoints));
      if (of_client(drawn) == client) return drawn;
    }
  }

  void start(std::size_t i, bool planned) {
    servers_[i] = {};
    servers_[i].may_die = planned;
    servers_[i].process = std::make_unique<RoleProcess>(
        "chaos_worker",
        Arguments{daemon_.socket(), std::to_string(random_()), std::to_string(i % 2 == 0 ? 0 : kOtherUser),
                  planned ? name(point(true)) : "-", std::to_string(planned ? 1 + below(300) : 0)});
  }

  // Those whose time has come go on; those that died as planned are replaced. False: one ended by itself.
  bool look_after_servers() {
    for (std::size_t i = 0; i < kServers; ++i) {
      Server& s = servers_[i];
      if (s.goes_on != Clock::time_point{} && Clock::now() >= s.goes_on) {
        ::kill(s.process->pid(), SIGCONT);
        s.goes_on = {};
      }
      siginfo_t info{};
      ::waitid(P_PID, static_cast<id_t>(s.process->pid()), &info, WEXITED | WNOHANG | WNOWAIT);
      if (info.si_pid == 0) continue;
      const int how = s.process->wait();
      if (how != -SIGKILL || !s.may_die) {
        ADD_FAILURE() << "server " << i << " ended by itself: " << how << "; see its message above";
        return false;
      }
      ++planned_deaths_;
      start(i, false);
    }
    return true;
  }

  void set(const std::string& key, const std::string& value) {
    try {
      RawSession(daemon_.socket()).set(key, value);
    } catch (const std::exception&) {
      ++settings_refused_;  // the marks' order, or a daemon that died
    }
  }

  void resize(std::uint64_t slabs) {
    try {
      RawSession(daemon_.socket()).resize(slabs * 256 * 1024);
    } catch (const std::exception&) {
      ++settings_refused_;
    }
  }

  void strike_daemon() {
    const std::uint64_t what = below(8);
    if (what < 2) return daemon_.kill();
    if (what < 5) {
      if (daemon_.plan_is_done()) daemon_.plan(name(point(false)), 1 + below(20));
      return daemon_.kill();
    }
    if (what == 5) return daemon_.upgrade();
    const pid_t pid = daemon_.pid();
    if (pid == 0 || ::kill(pid, SIGSTOP) != 0) return;
    std::this_thread::sleep_for(milliseconds(below(100)));
    ::kill(pid, SIGCONT);
  }

  void strike_server() {
    const std::size_t i = below(kServers);
    Server& s = servers_[i];
    if (below(2) == 0) {
      s.process->kill();
      ++deaths_;
      return start(i, below(2) == 0);
    }
    if (s.goes_on != Clock::time_point{}) return;
    ::kill(s.process->pid(), SIGSTOP);
    s.goes_on = Clock::now() + milliseconds(below(16) == 0 ? 11'000 : below(200));
  }

  void change_settings() {
    const std::uint64_t what = below(8);
    if (what > 5) return resize(8 + below(40));  // of 16 at the start
    if (what == 0) return set("quota.mine", std::to_string(below(12) * 256) + "KiB");
    if (what == 1) return set("quota.theirs", std::to_string(below(12) * 256) + "KiB");
    if (what == 2) return set("share.mine", std::to_string(1 + below(4)));
    if (what == 3) return set("evict_at", "0." + std::to_string(10 + below(80)));
    set("quantize_at", "0." + std::to_string(10 + below(80)));
  }

  void run_until(Clock::time_point end) {
    while (Clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(below(250)));
      if (!look_after_servers()) return;
      const std::uint64_t what = below(8);
      what < 3 ? strike_daemon() : what < 5 ? strike_server() : change_settings();
    }
  }

  void all_end_well() {
    for (std::size_t i = 0; i < kServers; ++i) {
      ::kill(servers_[i].process->pid(), SIGCONT);
      servers_[i].process->say("end");
    }
    for (std::size_t i = 0; i < kServers; ++i) {
      std::string line = "it died as planned";
      try {
        ASSERT_EQ(servers_[i].process->hear(), "started");
        line = servers_[i].process->hear();
      } catch (const std::exception& error) {
        EXPECT_TRUE(servers_[i].may_die) << i << ": " << error.what();
      }
      const int how = servers_[i].process->wait();
      EXPECT_TRUE(how == 0 || (how == -SIGKILL && servers_[i].may_die)) << i << ": " << how;
      std::printf("server %zu: %s\n", i, line.c_str());
    }
  }

  std::mt19937_64 random_;
  HeldDaemon daemon_;
  Books books_;
  std::vector<Server> servers_;
  std::uint64_t deaths_ = 0, planned_deaths_ = 0, settings_refused_ = 0;
};

TEST_F(Chaos, NoWrongByteAndNoDebt) {
  const char* given = std::getenv("KVQ_CHAOS_SECONDS");
  run_until(Clock::now() + std::chrono::seconds(given != nullptr ? std::atoi(given) : 40));
  if (!HasFailure()) all_end_well();
  std::printf("%u lives of kvqd; %llu servers killed, %llu died where planned; %llu settings refused\n",
              daemon_.lives(), static_cast<unsigned long long>(deaths_),
              static_cast<unsigned long long>(planned_deaths_), static_cast<unsigned long long>(settings_refused_));
  if (!HasFailure()) {
    EXPECT_GT(daemon_.lives(), 2u);
    EXPECT_EQ(books_.close(), "");
  }
  const std::string log = daemon_.log();
  EXPECT_EQ(log.find("adopt_refused"), std::string::npos);
  EXPECT_EQ(log.find("page_lost"), std::string::npos);
  EXPECT_EQ(log.find("assertion failed"), std::string::npos);
  if (HasFailure())
    std::fprintf(stderr, "the end of kvqd's log:\n%s\n",
                 log.substr(log.size() - std::min<std::size_t>(log.size(), 20'000)).c_str());
}

}  // namespace
}  // namespace kvq::test

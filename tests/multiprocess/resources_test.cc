// A machine that runs out of things, and processes that stop or vanish at bad moments: kvqd says so and goes on.
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "tests/e2e/process.h"
#include "tests/multiprocess/decoder.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;
using testing::Directory;
using testing::Ended;
using testing::Process;

constexpr uid_t kOtherUser = 65534;
constexpr auto kPatience = std::chrono::seconds(20);

long ms_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
}

// Until `done`; false after kPatience.
template <typename Done>
bool eventually(Done done) {
  for (const auto until = Clock::now() + kPatience; !done();) {
    if (Clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // what another process does has no event here
  }
  return true;
}

// A soft limit of a running process, put back at the end.
class Limited {
 public:
  Limited(pid_t pid, __rlimit_resource what, rlim_t value) : pid_(pid), what_(what) {
    EXPECT_EQ(::prlimit(pid, what, nullptr, &before_), 0);
    const rlimit now{value, before_.rlim_max};
    EXPECT_EQ(::prlimit(pid, what, &now, nullptr), 0) << std::strerror(errno);
  }
  ~Limited() { lift(); }
  void lift() { EXPECT_EQ(::prlimit(pid_, what_, &before_, nullptr), 0); }

 private:
  pid_t pid_;
  __rlimit_resource what_;
  rlimit before_{};
};

[[maybe_unused]] rlim_t descriptors_of(pid_t pid) {
  rlim_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd"))
    ++count;
  return count;
}

std::string failure_of(const std::function<void()>& call, kvq_status* status) {
  try {
    call();
  } catch (const Failure& failure) {
    *status = failure.status();
    return failure.what();
  }
  *status = KVQ_OK;
  return "";
}

std::vector<std::string> small_daemon(const std::string& socket) {
  return {KVQD_PATH, "--socket", socket, "--arena-bytes", "4MiB", "--slab-bytes", "256KiB", "--max-pages", "1024"};
}

// What the daemon at `socket` says as soon as there is one; "" after kPatience.
std::string await_status(const std::string& socket) {
  std::string status;
  EXPECT_TRUE(eventually([&] {
    try {
      status = RawSession(socket).status();
    } catch (const std::runtime_error&) {  // not yet
    }
    return !status.empty();
  }));
  return status;
}

struct Working {
  explicit Working(const std::string& socket) : tiny(socket, {}), sequence(tiny.model().open({})) { go_on(); }
  void go_on() {
    tiny.write(sequence, at, token_stream(7, 16));
    at += 16;
    EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(at), 0, test_seed()).exact, 1u);
  }
  TinyModel tiny;
  Sequence sequence;
  std::uint64_t at = 0;
};

TEST(Resources, NoMemoryForFilesRefusesWhatIsNewAndEndsWithTheShortage) {
  DaemonProcess daemon(calm_settings());
  Working working(daemon.socket());
  Sequence more = working.tiny.model().open({});
  kvq_status status = KVQ_OK;
  {
    const Limited files(daemon.pid(), RLIMIT_FSIZE, 4096);
    EXPECT_EQ(kvq_reserve(more.get(), 40 * KVQ_PAGE_TOKENS, 300), KVQ_ERR_NO_MEMORY) << kvq_last_error();
    const std::string text = failure_of([&] { TinyModel other(daemon.socket(), {.fingerprint = 2}); }, &status);
    EXPECT_TRUE(status == KVQ_ERR_SYSTEM || status == KVQ_ERR_NO_MEMORY) << text;
    EXPECT_NE(text, "");
    working.go_on();
  }
  EXPECT_EQ(kvq_reserve(more.get(), 40 * KVQ_PAGE_TOKENS, 20'000), KVQ_OK) << kvq_last_error() << daemon.log();
  Working other(daemon.socket());
  working.go_on();
  EXPECT_EQ(daemon.stop(SIGTERM), 0);
}

// Not with sanitizers: UBSan looks at objects through a pipe, and without descriptors for it takes them for damaged.
#if !defined(__SANITIZE_ADDRESS__)
TEST(Resources, NoDescriptorsRefusesWhatIsNewAndEndsWithTheShortage) {
  DaemonProcess daemon(calm_settings());
  Working working(daemon.socket());
  Sequence more = working.tiny.model().open({});
  const rlim_t open = descriptors_of(daemon.pid());
  for (const rlim_t spare : {0, 2, 5, 9}) {
    const Limited descriptors(daemon.pid(), RLIMIT_NOFILE, open + spare);
    kvq_status status = KVQ_OK;
    const std::string text = failure_of(
        [&] {
          Client client(daemon.socket(), "late", 500);
          const kvq_layer layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads};
          kvq_model_desc desc{};
          desc.size = sizeof(desc);
          desc.layers = &layer;
          desc.layer_count = 1;
          desc.page_tokens = KVQ_PAGE_TOKENS;
          desc.deadline_ms = 500;
          Model model(client, desc);
        },
        &status);
    EXPECT_NE(status, KVQ_OK) << spare << " spare descriptors";
    std::printf("%d spare descriptors: %s\n", static_cast<int>(spare), text.c_str());
    if (spare == 0) {
      EXPECT_EQ(kvq_reserve(more.get(), 40 * KVQ_PAGE_TOKENS, 300), KVQ_ERR_NO_MEMORY) << kvq_last_error();
    }
    working.go_on();
  }
  EXPECT_EQ(kvq_reserve(more.get(), 40 * KVQ_PAGE_TOKENS, 20'000), KVQ_OK) << kvq_last_error() << daemon.log();
  Working other(daemon.socket());
  working.go_on();
  EXPECT_TRUE(eventually([&] {
    return RawSession(daemon.socket()).status().find("\"sessions\":2,") != std::string::npos;
  })) << RawSession(daemon.socket()).status();
}

#endif

TEST(Resources, FullDiskUnderTheLogStopsNothing) {
  Directory directory;
  const std::string socket = directory.file("kvqd.sock");
  std::vector<std::string> arguments = small_daemon(socket);
  arguments.insert(arguments.end(), {"--log-level", "trace"});
  Process daemon(directory, arguments, {}, [] { ::dup2(::open("/dev/full", O_WRONLY), 2); });
  await_status(socket);
  for (int round = 0; round < 5; ++round) {
    Working working(socket);
    working.go_on();
  }
  EXPECT_EQ(daemon.end(SIGTERM).exit_code, 0);
}

TEST(Resources, StoppedKvqdIsAnErrorInTimeAndThenAllGoesOn) {
  DaemonProcess daemon(calm_settings());
  Working working(daemon.socket());
  Sequence more = working.tiny.model().open({});
  ASSERT_EQ(::kill(daemon.pid(), SIGSTOP), 0);
  for (const std::uint32_t deadline_ms : {0u, 200u, 1000u}) {
    const auto start = Clock::now();
    EXPECT_EQ(kvq_reserve(more.get(), 40 * KVQ_PAGE_TOKENS, deadline_ms), KVQ_ERR_DAEMON_GONE) << kvq_last_error();
    EXPECT_GE(ms_since(start), static_cast<long>(deadline_ms));
    EXPECT_LE(ms_since(start), static_cast<long>(deadline_ms) + 1500) << "the answer's grace is half a second";
    EXPECT_NE(std::strstr(kvq_last_error(), daemon.socket().c_str()), nullptr) << kvq_last_error();
  }
  EXPECT_EQ(working.tiny.attend_and_check(working.sequence.block_table(), 16, 1, 1).exact, 1u);
  kvq_status status = KVQ_OK;
  const std::string text = failure_of([&] { TinyModel late(daemon.socket(), {.credits = 1}); }, &status);
  EXPECT_EQ(status, KVQ_ERR_NO_DAEMON) << text;
  ASSERT_EQ(::kill(daemon.pid(), SIGCONT), 0);
  EXPECT_EQ(kvq_reserve(more.get(), 40 * KVQ_PAGE_TOKENS, 20'000), KVQ_OK) << kvq_last_error();
  working.go_on();
  Working other(daemon.socket());
}

// A server of another tenant that stays inside an open step.
KVQ_ROLE(stuck) {
  if (::setgroups(0, nullptr) != 0 || ::setgid(kOtherUser) != 0 || ::setuid(kOtherUser) != 0) return 2;
  TinyModel tiny(arguments[0], {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 200));
  Step step(tiny.model());
  say(std::to_string(tiny.model().info().session));
  hear();
  return 0;
}

class Stopped : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::geteuid(), 0u) << "run as root: this test becomes another user"; }
  Ended ctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {KVQCTL_PATH, "--socket", daemon_.socket()});
    return testing::run(directory_, std::move(arguments));
  }
  json session(const std::string& id) {
    const json all = json::parse(ctl({"sessions", "--json"}).out);
    for (const json& s : all["sessions"]) {
      if (s["id"].dump() == id) return s;
    }
    return {};
  }
  Directory directory_;
  DaemonProcess daemon_{calm_settings() +
                        "step_deadline_ms = 300\nsocket_group = \"nogroup\"\n[[tenants]]\nname = \"mine\"\nuids = [0]\n"
                        "[[tenants]]\nname = \"theirs\"\nuids = [65534]\n"};
};

TEST_F(Stopped, ClientHoldsBackItsTenantOnlyAndCanBeEvicted) {
  RoleProcess stuck("stuck", {daemon_.socket()});
  const std::string id = stuck.hear();
  DecoderProcess decoder(daemon_.socket(), 1);
  ASSERT_EQ(::kill(stuck.pid(), SIGSTOP), 0);
  ASSERT_TRUE(eventually([&] { return session(id)["hung"] == true; })) << session(id);
  EXPECT_EQ(session(id)["pid"], stuck.pid());
  EXPECT_EQ(session(id)["tenant"], "theirs");
  decoder.report();
  decoder.decode_for(1000);
  const DecoderReport r = decoder.report();
  std::printf("beside a stopped client: %s\n", r.text().c_str());
  EXPECT_GT(r.turns, 5u);
  EXPECT_LE(r.turn_max_ms, 5000);

  EXPECT_EQ(ctl({"evict-session", id}).exit_code, 0);
  EXPECT_EQ(session(id)["evicted"], true);
  EXPECT_EQ(session(id)["sequences"], 0);
  EXPECT_EQ(::waitpid(stuck.pid(), nullptr, WNOHANG), 0) << "it must live: nobody asked to kill it";
  EXPECT_EQ(ctl({"evict-session", id, "--kill"}).exit_code, 0);
  EXPECT_EQ(stuck.wait(), -SIGKILL);
  EXPECT_TRUE(eventually([&] { return session(id).is_null(); }));
  EXPECT_EQ(decoder.end(), 0);
}

// Forks while it works; its children keep the inherited socket and everything mapped.
KVQ_ROLE(forker) {
  TinyModel tiny(arguments[0], {});
  Sequence sequence = tiny.model().open({});
  for (std::uint64_t at = 0; at < 8 * 16; at += 16) {
    tiny.write(sequence, at, token_stream(3, 16));
    const pid_t child = ::fork();
    if (child == 0) {
      const bool refused = kvq_reserve(sequence.get(), 64, 0) == KVQ_ERR_FORKED;
      say(refused ? "refused " + std::to_string(::getpid()) : "allowed: " + std::string(kvq_last_error()));
      for (;;) ::pause();
    }
    tiny.attend_and_check(sequence.block_table(), static_cast<std::int32_t>(at + 16), 0, at);
  }
  say("done");
  hear();
  return 0;
}

TEST(Resources, ChildrenThatInheritTheSocketDoNotKeepASessionAlive) {
  DaemonProcess daemon(calm_settings());
  RoleProcess forker("forker", {daemon.socket()});
  std::vector<pid_t> children;
  for (int lines = 0; lines < 9; ++lines) {
    const std::string line = forker.hear();
    if (line == "done") continue;
    ASSERT_EQ(line.substr(0, 8), "refused ") << line;
    children.push_back(std::stoi(line.substr(8)));
  }
  const auto sessions = [&] { return json::parse(RawSession(daemon.socket()).status())["sessions"].get<int>(); };
  EXPECT_EQ(children.size(), 8u);
  EXPECT_EQ(sessions(), 1);
  EXPECT_EQ(forker.kill(), -SIGKILL);
  EXPECT_TRUE(eventually([&] { return sessions() == 0; })) << "its children hold the socket open";
  for (const pid_t child : children) {
    EXPECT_EQ(::kill(child, 0), 0);
    ::kill(child, SIGKILL);
  }
  TinyModel after(daemon.socket(), {});
  Sequence all = after.model().open({});
  EXPECT_EQ(kvq_reserve(all.get(), 100 * KVQ_PAGE_TOKENS, 20'000), KVQ_OK) << kvq_last_error();
}

TEST(Resources, OfTwoDaemonsForOneSocketExactlyOneServes) {
  Directory directory;
  const std::string socket = directory.file("kvqd.sock");
  for (int round = 0; round < 6; ++round) {
    std::unique_ptr<Process> rivals[2];
    for (auto& rival : rivals) rival = std::make_unique<Process>(directory, small_daemon(socket));
    int loser = -1;
    ASSERT_TRUE(eventually([&] {
      for (int i = 0; i < 2; ++i) {
        siginfo_t ended{};
        ::waitid(P_PID, static_cast<id_t>(rivals[i]->pid), &ended, WEXITED | WNOHANG | WNOWAIT);
        if (ended.si_pid == rivals[i]->pid) loser = i;
      }
      return loser >= 0;
    }));
    const pid_t winner = rivals[1 - loser]->pid;
    const Ended lost = rivals[loser]->wait();
    EXPECT_EQ(lost.exit_code, 3) << lost.err;
    EXPECT_NE(lost.err.find("already running (pid " + std::to_string(winner) + ")"), std::string::npos) << lost.err;
    EXPECT_EQ(json::parse(await_status(socket))["pid"], winner);
    EXPECT_EQ(rivals[1 - loser]->end(SIGTERM).exit_code, 0);
  }
}

TEST(Resources, RemovedLockFileLetsNoSecondDaemonIn) {
  DaemonProcess daemon(calm_settings());
  Working working(daemon.socket());
  ASSERT_EQ(::unlink((daemon.socket() + ".lock").c_str()), 0);
  Directory directory;
  const Ended second = testing::run(directory, small_daemon(daemon.socket()));
  EXPECT_EQ(second.exit_code, 3) << second.err;
  EXPECT_NE(second.err.find("already running (pid " + std::to_string(daemon.pid()) + ")"), std::string::npos)
      << second.err;
  working.go_on();
  Working other(daemon.socket());
}

TEST(Resources, RemovedDirectoryLeavesSessionsAloneAndIsNamed) {
  DaemonProcess daemon(calm_settings());
  Working working(daemon.socket());
  const std::string folder = std::filesystem::path(daemon.socket()).parent_path();
  std::filesystem::remove_all(folder);
  working.go_on();
  EXPECT_EQ(kvq_credits_request(working.tiny.get(), 64, 10'000), KVQ_OK) << kvq_last_error();
  kvq_status status = KVQ_OK;
  const std::string text = failure_of([&] { Client late(daemon.socket(), "late", 200); }, &status);
  EXPECT_EQ(status, KVQ_ERR_NO_DAEMON);
  EXPECT_NE(text.find(daemon.socket()), std::string::npos) << text;
  EXPECT_EQ(daemon.stop(SIGTERM), 0);
  Directory directory;
  const Ended again = testing::run(directory, small_daemon(daemon.socket()));
  EXPECT_EQ(again.exit_code, 4);
  EXPECT_NE(again.err.find("directory " + folder + ": No such file or directory: create it (mkdir -p " + folder),
            std::string::npos)
      << again.err;
}

}  // namespace
}  // namespace kvq::test

// The real kvqd: how it starts, refuses to start, and ends.
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>

#include <algorithm>
#include <memory>

#include "tests/e2e/process.h"

namespace kvq {
namespace {

using namespace kvq::testing;

// It ended at once, said one line that starts with "kvqd: " and holds each of `texts`.
void expect_refused(const Ended& ended, int exit_code, const std::vector<std::string>& texts) {
  EXPECT_EQ(ended.exit_code, exit_code) << ended.err;
  EXPECT_EQ(lines(ended.err), 1u) << ended.err;
  EXPECT_EQ(ended.err.rfind("kvqd: ", 0), 0u) << ended.err;
  EXPECT_EQ(ended.out, "");
  for (const std::string& text : texts)
    EXPECT_NE(ended.err.find(text), std::string::npos) << text << " in " << ended.err;
}

// Stops one thread of a child, and no other, until it goes.
class StoppedThread {
 public:
  explicit StoppedThread(pid_t thread) : thread_(thread) {
    EXPECT_EQ(::ptrace(PTRACE_SEIZE, thread, 0, 0), 0) << std::strerror(errno);
    EXPECT_EQ(::ptrace(PTRACE_INTERRUPT, thread, 0, 0), 0) << std::strerror(errno);
    EXPECT_EQ(::waitpid(thread, nullptr, __WALL), thread);
  }
  ~StoppedThread() { EXPECT_EQ(::ptrace(PTRACE_DETACH, thread_, 0, 0), 0) << std::strerror(errno); }

 private:
  const pid_t thread_;
};

TEST(Daemon, SigtermEndsItAndLeavesNoSocket) {
  Directory directory;
  Daemon daemon(directory);
  EXPECT_TRUE(std::filesystem::exists(daemon.socket));
  const Ended ended = daemon.process->end(SIGTERM);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_TRUE(daemon.notify.hear("STOPPING=1"));
  EXPECT_FALSE(std::filesystem::exists(daemon.socket));
  EXPECT_NE(ended.err.find("event=ready"), std::string::npos);
  EXPECT_NE(ended.err.find("event=stopping"), std::string::npos);
}

TEST(Daemon, SigintEndsItToo) {
  Directory directory;
  Daemon daemon(directory);
  EXPECT_EQ(daemon.process->end(SIGINT).exit_code, 0);
}

TEST(Daemon, ASecondOneOnTheSameSocketIsRefusedAndHarmless) {
  Directory directory;
  Daemon daemon(directory);
  expect_refused(
      run(directory, {KVQD_PATH, "--socket", daemon.socket, "--arena-bytes", "16MiB", "--slab-bytes", "1MiB"}), 3,
      {daemon.socket});
  EXPECT_EQ(run(directory, {KVQCTL_PATH, "--socket", daemon.socket, "status"}).exit_code, 0);
}

TEST(Daemon, AStaleSocketIsReplaced) {
  Directory directory;
  { Daemon killed(directory); }  // SIGKILL: nothing is cleaned up
  ASSERT_TRUE(std::filesystem::exists(directory.file("kvqd.sock")));
  Daemon daemon(directory);
  EXPECT_EQ(run(directory, {KVQCTL_PATH, "--socket", daemon.socket, "status"}).exit_code, 0);
}

TEST(Daemon, AMissingDirectoryIsNamed) {
  Directory directory;
  expect_refused(run(directory, {KVQD_PATH, "--socket", directory.file("none/kvqd.sock")}), 4,
                 {directory.file("none")});
}

TEST(Daemon, AConfigurationTypoIsNamedWithItsLine) {
  Directory directory;
  const std::string config = directory.write("kvqd.toml", "slab_bytes = \"1MiB\"\narena_byte = \"16MiB\"\n");
  expect_refused(run(directory, {KVQD_PATH, "--config", config}), 2, {"kvqd.toml:2", "arena_byte", "arena_bytes"});
}

TEST(Daemon, BadValuesAreNamed) {
  Directory directory;
  expect_refused(run(directory, {KVQD_PATH, "--arena-bytes", "10MiB", "--slab-bytes", "3MiB"}), 2, {"slab-bytes"});
  expect_refused(run(directory, {KVQD_PATH, "--arena-bytes", "lots"}), 2, {"arena-bytes", "lots"});
  expect_refused(run(directory, {KVQD_PATH, "--quantize-at", "0.9", "--evict-at", "0.8"}), 2, {"0.9", "0.8"});
  expect_refused(run(directory, {KVQD_PATH, "--nonsense"}), 2, {"nonsense"});
  expect_refused(run(directory, {KVQD_PATH, "--config", directory.file("absent.toml")}), 2, {"absent.toml"});
  expect_refused(run(directory, {KVQD_PATH, "--socket", directory.file("s"), "--arena-bytes", "16MiB", "--slab-bytes",
                                 "1MiB", "--admin-group", "no-such-group-here"}),
                 2, {"no-such-group-here"});
}

TEST(Daemon, TooFewDescriptorsAreNamedAtTheStart) {
  Directory directory;
  const auto starve = [] {
    const rlimit tiny{32, 32};
    ::setrlimit(RLIMIT_NOFILE, &tiny);
  };
  expect_refused(
      run(directory, {KVQD_PATH, "--socket", directory.file("s"), "--arena-bytes", "16MiB", "--slab-bytes", "1MiB"}, {},
          starve),
      4, {"32"});
  EXPECT_FALSE(std::filesystem::exists(directory.file("s")));
}

TEST(Daemon, MemfdsThatMayNotGrowAreNamedAtTheStart) {
  Directory directory;
  const auto starve = [] {
    const rlimit tiny{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &tiny);
    ::signal(SIGXFSZ, SIG_IGN);
  };
  expect_refused(
      run(directory, {KVQD_PATH, "--socket", directory.file("s"), "--arena-bytes", "16MiB", "--slab-bytes", "1MiB"}, {},
          starve),
      4, {"memfd", "RLIMIT_FSIZE is 4096"});
}

TEST(Daemon, LockedMemoryThatMayNotBeHadIsNamedAtTheStart) {
  Directory directory;
  const auto starve = [] {  // also without root's right to exceed it
    ::prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE);
    ::prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK);
    const rlimit tiny{65536, 65536};
    ::setrlimit(RLIMIT_MEMLOCK, &tiny);
  };
  expect_refused(run(directory,
                     {KVQD_PATH, "--socket", directory.file("s"), "--arena-bytes", "16MiB", "--slab-bytes", "1MiB",
                      "--lock-memory", "true"},
                     {}, starve),
                 4, {"RLIMIT_MEMLOCK is 65536", "LimitMEMLOCK=infinity"});
}

TEST(Daemon, CheckConfigOnlyChecks) {
  Directory directory;
  const Ended ended = run(directory, {KVQD_PATH, "--check-config", "--arena-bytes", "16MiB", "--slab-bytes", "1MiB"});
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_NE(ended.out.find("16 slabs"), std::string::npos) << ended.out;
}

TEST(Daemon, TellsTheWatchdogThatItLives) {
  Directory directory;
  Daemon daemon(directory, {}, {"WATCHDOG_USEC=200000"});
  EXPECT_TRUE(daemon.notify.hear("WATCHDOG=1"));
}

TEST(Daemon, ALoopThatStandsStillFeedsNoWatchdog) {
  Directory directory;
  Daemon daemon(directory, {}, {"WATCHDOG_USEC=100000"});
  EXPECT_TRUE(daemon.notify.hear("WATCHDOG=1"));
  {
    const StoppedThread loop(daemon.process->pid);
    daemon.notify.hear("nothing", 0);  // what was sent before
    EXPECT_FALSE(daemon.notify.hear("WATCHDOG=1", 500)) << "another thread said so";
  }
  EXPECT_TRUE(daemon.notify.hear("WATCHDOG=1"));
}

TEST(Daemon, ItsStatusLineGoesOnToHaveFigures) {
  Directory directory;
  Daemon daemon(directory);
  EXPECT_TRUE(daemon.notify.hear("STATUS=0 sessions; host 0 % of 16.0 MiB, calm"));
}

TEST(Daemon, DrainEndsItWithZero) {
  Directory directory;
  Daemon daemon(directory);
  const Ended drained = run(directory, {KVQCTL_PATH, "--socket", daemon.socket, "drain", "--deadline", "5"});
  EXPECT_EQ(drained.exit_code, 0) << drained.err;
  EXPECT_EQ(daemon.process->wait().exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(daemon.socket));
}

}  // namespace
}  // namespace kvq

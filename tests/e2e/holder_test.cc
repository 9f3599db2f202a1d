// kvq-hold with a daemon that does as it is told (fake_daemon.cc): what is held, handed back, refused, and when it
// ends.
#include <algorithm>
#include <memory>
#include <thread>

#include "tests/e2e/process.h"
#include "tests/support/seed.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using Words = std::vector<std::string>;

constexpr int kGaveUp = 5;

class Holder : public ::testing::Test {
 protected:
  Words command(const Words& options, const Words& script) const {
    Words argv = {KVQ_HOLD_PATH, "--restart-ms", "1"};
    argv.insert(argv.end(), options.begin(), options.end());
    argv.insert(argv.end(), {"--", FAKE_DAEMON_PATH, directory_.path});
    argv.insert(argv.end(), script.begin(), script.end());
    return argv;
  }
  Ended hold(const Words& script, const Words& options = {}) {
    std::filesystem::remove(directory_.file("starts"));
    return run(directory_, command(options, script), {"TMPDIR=" + directory_.path});
  }
  std::unique_ptr<Process> start(const Words& script, const Words& options = {}) {
    return std::make_unique<Process>(directory_, command(options, script), Words{"TMPDIR=" + directory_.path});
  }
  // The daemon was started `count` times and is ready.
  static bool ready(const Process& holder, std::size_t count) {
    return eventually([&] { return occurrences(holder.err(), "ready pid=") >= count; });
  }
  static std::size_t occurrences(const std::string& text, const std::string& part) {
    std::size_t count = 0;
    for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
    return count;
  }
  static bool eventually(const std::function<bool()>& holds) {
    for (int i = 0; i < kPatienceMs; ++i) {
      if (holds()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  static pid_t daemon_pid(const std::string& err) {
    return std::stoi(err.substr(err.rfind("started pid=") + std::strlen("started pid=")));
  }
  std::size_t left_over() const {  // folders of notify sockets that were not removed
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path)) {
      count += entry.path().filename().string().starts_with("kvq-hold-");
    }
    return count;
  }

  Directory directory_;
};

#define EXPECT_SAYS(ended, text) EXPECT_NE((ended).err.find(text), std::string::npos) << text << " in\n" << (ended).err

TEST_F(Holder, HandsBackWhatWasStoredAfterADeath) {
  const Ended ended = hold({"store", "a=first", "store", "b=second", "die", "--", "count", "2", "expect", "a=first",
                            "expect", "b=second", "exit", "0"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_SAYS(ended, "died cause=\"signal 9 (Killed)\"; holds 2 descriptors");
  EXPECT_EQ(left_over(), 0u);
}

TEST_F(Holder, WhatWasRemovedOrReplacedDoesNotComeBack) {
  const Ended ended =
      hold({"store", "a=old", "store", "b=stays", "store", "a=older", "remove", "a",      "remove",  "absent", "store",
            "a=new", "die",   "--",    "count",   "2",     "expect",  "a=new",  "expect", "b=stays", "exit",   "0"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}

TEST_F(Holder, SeveralOfOneNameAreHandedBackNewestFirstAsSystemdDoes) {
  EXPECT_EQ(hold({"store", "a=x", "store", "a=y", "die", "--", "count", "2", "expect", "a=y", "exit", "0"}).exit_code,
            0);
}

TEST_F(Holder, OneOpenFileIsHeldOnceAsSystemdDoes) {
  const Ended ended = hold({"twice", "die", "--", "count", "1", "expect", "one=twice", "exit", "0"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_SAYS(ended, "refused two: it is the same open file as one");
}

TEST_F(Holder, NothingIsLostThatWasSentRightBeforeSigkill) {
  const Ended ended = hold({"grow", "50"}, {"--restart-ms", "0", "--give-up-after", "50"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(occurrences(ended.err, "signal 9"), 50u);
}

TEST_F(Holder, ThousandsAreHandedBack) {
  const Ended ended = hold({"many", "5000", "die", "--", "expect-many", "5000", "exit", "0"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_SAYS(ended, "holds 5000 descriptors");
}

TEST_F(Holder, ItsLimitIsLoudAndWhatWasHeldStays) {
  const Ended ended =
      hold({"many", "5", "store", "m3=over", "die", "--", "expect-many", "3", "exit", "0"}, {"--max-descriptors", "3"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_SAYS(ended, "refused m3: 3 descriptors are held, which is the limit: raise --max-descriptors");
}

TEST_F(Holder, NamesThatFitIntoNoEnvironmentAreRefusedBeforeTheyPreventAStart) {
  Words script;
  for (int i = 0; i < 520; ++i) {
    script.insert(script.end(), {"store", std::string(250, 'n') + std::to_string(1000 + i) + "=x"});
  }
  script.insert(script.end(), {"die", "--", "expect", std::string(250, 'n') + "1000=x", "exit", "0"});
  const Ended ended = hold(script);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_SAYS(ended, "fill what one environment variable can hold");
}

TEST_F(Holder, MessagesThatMakeNoSenseAreRefusedAndHarmless) {
  const Ended ended = hold({"store",   "a=kept",
                            "raw",     "FDSTORE=1\nFDNAME=none",
                            "rawfd",   "FDNAME=b",
                            "rawfd",   "FDSTORE=1\nFDNAME=b:c",
                            "rawfd",   "FDSTORE=1\nFDNAME=",
                            "rawfd",   "FDSTORE=1\nFDSTOREREMOVE=1",
                            "huge",    "zero",
                            "raw",     "\n\n==\n=",
                            "raw",     "STATUS=fine\nFDSTORE=2\nMAINPID=1",
                            "foreign", "f",
                            "die",     "--",
                            "count",   "1",
                            "expect",  "a=kept",
                            "exit",    "0"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(occurrences(ended.err, "refused"), 8u) << ended.err;
  for (const char* why :
       {"FDSTORE=1 without a descriptor", "1 descriptors without FDSTORE=1", "printable characters",
        "stores and removes at once", "longer than 4096 bytes", "zero byte", "who is not the daemon"}) {
    EXPECT_SAYS(ended, why);
  }
}

TEST_F(Holder, NoiseNeitherEndsItNorTouchesWhatItHolds) {
  const std::uint64_t seed = test_seed(20261129);
  std::printf("KVQ_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  const Ended ended = hold({"store", "safe-one=kept", "noise", std::to_string(seed), "store", "safe-two=after", "die",
                            "--", "expect", "safe-one=kept", "expect", "safe-two=after", "exit", "0"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_LE(lines(ended.err), 100u) << "noise is no flood of lines";
}

TEST_F(Holder, RefusedDescriptorsAreClosed) {
  const auto open_files = [](const Process& holder) {
    return std::distance(std::filesystem::directory_iterator("/proc/" + std::to_string(holder.pid) + "/fd"), {});
  };
  const auto quiet = start({"store", "a=x", "wait"});
  ASSERT_TRUE(ready(*quiet, 1)) << quiet->err();
  const auto usual = open_files(*quiet);
  EXPECT_EQ(quiet->end(SIGTERM).exit_code, 0);

  std::filesystem::remove(directory_.file("starts"));
  Words script = {"store", "a=x"};
  for (int i = 0; i < 100; ++i) script.insert(script.end(), {"foreign", "f", "rawfd", "FDNAME=b", "huge", "zero"});
  script.push_back("wait");
  const auto holder = start(script);
  ASSERT_TRUE(ready(*holder, 1)) << holder->err();
  EXPECT_EQ(open_files(*holder), usual);
  const Ended ended = holder->end(SIGTERM);
  EXPECT_LE(occurrences(ended.err, "refused"), 100u) << "a flood of refusals is no flood of lines";
}

TEST_F(Holder, ACrashLoopGivesUpLoudly) {
  const Ended ended = hold({"store", "a=x", "die"}, {"--give-up-after", "3", "--within-ms", "60000"});
  EXPECT_EQ(ended.exit_code, kGaveUp) << ended.err;
  EXPECT_EQ(occurrences(ended.err, "started pid="), 4u);
  EXPECT_SAYS(ended, "GIVES UP: " FAKE_DAEMON_PATH
                     " died 4 times within 60000 ms, last by signal 9 (Killed); dropping 4 descr");
}

TEST_F(Holder, DeathsLongAgoDoNotCount) {
  const Ended ended = hold({"die", "--", "die", "--", "die", "--", "die", "--", "exit", "0"},
                           {"--give-up-after", "1", "--within-ms", "30", "--restart-ms", "60"});
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
}

TEST_F(Holder, AnEndOfTheDaemonsOwnChoiceIsPassedOn) {
  for (const int code : {0, 2, 3, 4, 42}) {
    const Ended ended = hold({"store", "a=x", "exit", std::to_string(code)});
    EXPECT_EQ(ended.exit_code, code) << ended.err;
    EXPECT_EQ(occurrences(ended.err, "started pid="), 1u);
    EXPECT_SAYS(ended, "dropping 1 descriptors");
  }
  const Ended failed = hold({"exit", "1", "--", "exit", "0"});
  EXPECT_EQ(failed.exit_code, 0) << "a failure is worth another start";
  EXPECT_SAYS(failed, "died cause=\"exit code 1\"");
}

TEST_F(Holder, AProgramThatIsNotThereIsNamed) {
  const Ended ended = run(directory_, {KVQ_HOLD_PATH, "--", directory_.file("absent")});
  EXPECT_EQ(ended.exit_code, 127) << ended.err;
  EXPECT_SAYS(ended, "cannot run " + directory_.file("absent"));
}

TEST_F(Holder, SigtermEndsBothAndRemovesItsFolder) {
  for (const int signal : {SIGTERM, SIGINT}) {
    std::filesystem::remove(directory_.file("starts"));
    const auto holder = start({"store", "a=x", "wait"});
    ASSERT_TRUE(ready(*holder, 1)) << holder->err();
    const pid_t daemon = daemon_pid(holder->err());
    const Ended ended = holder->end(signal);
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_EQ(::kill(daemon, 0), -1);
    EXPECT_EQ(left_over(), 0u);
  }
}

TEST_F(Holder, SigtermWhileTheDaemonIsDownEndsItToo) {
  const auto holder = start({"die"}, {"--restart-ms", "600000"});
  ASSERT_TRUE(eventually([&] { return occurrences(holder->err(), "died") == 1; }));
  EXPECT_EQ(holder->end(SIGTERM).exit_code, 0);
}

TEST_F(Holder, SighupStartsTheDaemonAgainWithEverything) {
  const auto holder = start({"store", "a=x", "wait", "--", "expect", "a=x", "store", "b=y", "wait", "--", "expect",
                             "a=x", "expect", "b=y", "wait"},
                            {"--give-up-after", "0"});
  for (std::size_t round = 1; round <= 2; ++round) {
    ASSERT_TRUE(ready(*holder, round)) << holder->err();
    ASSERT_EQ(::kill(holder->pid, SIGHUP), 0);
  }
  ASSERT_TRUE(ready(*holder, 3)) << holder->err();
  const Ended ended = holder->end(SIGTERM);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_SAYS(ended, "ended for a restart; holds 2 descriptors");
}

TEST_F(Holder, ItsOwnDeathEndsTheDaemon) {
  const auto holder = start({"wait"});
  ASSERT_TRUE(ready(*holder, 1)) << holder->err();
  const pid_t daemon = daemon_pid(holder->err());
  holder->end(SIGKILL);
  EXPECT_TRUE(eventually([&] {
    return ::kill(daemon, 0) != 0 ||
           read_file("/proc/" + std::to_string(daemon) + "/stat").find(") Z") != std::string::npos;
  }));
}

int connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0) << std::strerror(errno);
  return fd;
}

std::string answer(int fd) {
  char text[64] = {};
  const ssize_t got = ::read(fd, text, sizeof text);
  ::close(fd);
  return got > 0 ? std::string(text, static_cast<std::size_t>(got)) : "";
}

TEST_F(Holder, ClientsThatConnectWhileTheDaemonIsDownAreServedByTheNext) {
  const std::string socket = directory_.file("s.sock");
  const auto holder = start({"serve"}, {"--socket", socket, "--socket-mode", "0600", "--restart-ms", "300"});
  ASSERT_TRUE(
      eventually([&] { return std::filesystem::exists(socket) && occurrences(holder->err(), "started") == 1; }));
  const pid_t first = daemon_pid(holder->err());
  EXPECT_EQ(answer(connect_to(socket)), "served by " + std::to_string(first));
  struct stat status {};
  ASSERT_EQ(::stat(socket.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  ASSERT_EQ(::kill(first, SIGKILL), 0);
  ASSERT_TRUE(eventually([&] { return occurrences(holder->err(), "died") == 1; }));
  std::vector<int> waiting;
  for (int i = 0; i < 20; ++i) waiting.push_back(connect_to(socket));
  EXPECT_EQ(occurrences(holder->err(), "started"), 1u) << "they connected in the gap";
  for (const int fd : waiting) {
    const std::string text = answer(fd);
    EXPECT_EQ(text.rfind("served by ", 0), 0u);
    EXPECT_NE(text, "served by " + std::to_string(first));
  }
  EXPECT_EQ(holder->end(SIGTERM).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(socket));
}

TEST_F(Holder, ASecondOneOnTheSameSocketIsRefusedAndHarmless) {
  const std::string socket = directory_.file("s.sock");
  const auto holder = start({"serve"}, {"--socket", socket});
  ASSERT_TRUE(eventually([&] { return occurrences(holder->err(), "started") == 1; }));
  const Ended second = run(directory_, command({"--socket", socket}, {"serve"}));
  EXPECT_EQ(second.exit_code, 3) << second.err;
  EXPECT_SAYS(second, "another kvq-hold has " + socket);
  EXPECT_EQ(answer(connect_to(socket)).rfind("served by ", 0), 0u);
  const Ended killed = holder->end(SIGKILL);
  const auto third = start({"serve"}, {"--socket", socket});  // a stale socket is replaced
  EXPECT_TRUE(eventually([&] { return occurrences(third->err(), "started") == 1; })) << third->err();
  EXPECT_EQ(third->end(SIGTERM).exit_code, 0);
}

TEST_F(Holder, BadCommandLinesAreOneLineWithTheFix) {
  for (const Words& options :
       {Words{"--no-such"}, Words{"--restart-ms", "soon"}, Words{"--socket-mode", "rw", "--", "x"}, Words{},
        Words{"--socket", directory_.file("s"), "--socket-group", "no-such-group-here", "--", "x"}}) {
    Words argv = {KVQ_HOLD_PATH};
    argv.insert(argv.end(), options.begin(), options.end());
    const Ended ended = run(directory_, argv);
    EXPECT_EQ(ended.exit_code, 2) << ended.err;
    EXPECT_EQ(lines(ended.err), 1u) << ended.err;
    EXPECT_EQ(ended.err.rfind("kvq-hold: ", 0), 0u) << ended.err;
  }
}

}  // namespace
}  // namespace kvq

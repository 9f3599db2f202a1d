// kvq-hold with the real kvqd.
#include <algorithm>
#include <memory>
#include <thread>

#include "tests/e2e/process.h"

namespace kvq {
namespace {

using namespace kvq::testing;

class HeldKvqd : public ::testing::Test {
 protected:
  HeldKvqd() {
    holder_ = std::make_unique<Process>(
        directory_,
        std::vector<std::string>{KVQ_HOLD_PATH, "--restart-ms", "10", "--socket", socket_, "--", KVQD_PATH, "--socket",
                                 socket_, "--arena-bytes", "16MiB", "--slab-bytes", "1MiB", "--max-pages", "4096"},
        std::vector<std::string>{"TMPDIR=" + directory_.path});
  }
  bool said(const std::string& part, std::size_t times) {
    for (int i = 0; i < kPatienceMs; ++i) {
      std::size_t count = 0;
      const std::string text = holder_->err();
      for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
      if (count >= times) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
  pid_t daemon_pid() const {
    const std::string text = holder_->err();
    return std::stoi(text.substr(text.rfind("started pid=") + std::strlen("started pid=")));
  }
  Ended ctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {KVQCTL_PATH, "--socket", socket_});
    return run(directory_, std::move(arguments));
  }

  Directory directory_;
  std::string socket_ = directory_.file("kvqd.sock");
  std::unique_ptr<Process> holder_;
};

TEST_F(HeldKvqd, IsStartedAgainAfterEachKillAndServesWhoWaited) {
  constexpr int kRounds = 5;  // as many deaths as the holder forgives
  for (int round = 1; round <= kRounds; ++round) {
    ASSERT_TRUE(said("ready pid=", static_cast<std::size_t>(round))) << holder_->err();
    ASSERT_EQ(::kill(daemon_pid(), SIGKILL), 0);
    const Ended status = ctl({"status"});  // most likely in the gap
    EXPECT_TRUE(status.exit_code == 0 || status.err.find("connection broke") != std::string::npos) << status.err;
  }
  ASSERT_TRUE(said("ready pid=", kRounds + 1)) << holder_->err();
  EXPECT_EQ(ctl({"status"}).exit_code, 0);
  EXPECT_EQ(holder_->end(SIGTERM).exit_code, 0);
}

TEST_F(HeldKvqd, SighupReplacesIt) {
  ASSERT_TRUE(said("ready pid=", 1)) << holder_->err();
  const pid_t first = daemon_pid();
  ASSERT_EQ(::kill(holder_->pid, SIGHUP), 0);
  ASSERT_TRUE(said("ready pid=", 2)) << holder_->err();
  EXPECT_NE(daemon_pid(), first);
  EXPECT_EQ(ctl({"status"}).exit_code, 0);
  const Ended ended = holder_->end(SIGTERM);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_EQ(ended.err.find("adopt_refused"), std::string::npos) << ended.err;
}

TEST_F(HeldKvqd, ADrainEndsBothAndNothingStaysHeld) {
  ASSERT_TRUE(said("ready pid=", 1)) << holder_->err();
  EXPECT_EQ(ctl({"drain", "--deadline", "5"}).exit_code, 0);
  const Ended ended = holder_->wait();
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  EXPECT_NE(ended.err.find("ended with exit code 0, which is its own choice; dropping 0 descriptors"),
            std::string::npos)
      << ended.err;
}

TEST(HeldKvqdAlone, AStateThatIsNoneIsRefusedWithTheReasonAndTheStartIsClean) {
  Directory directory;
  const std::string socket = directory.file("kvqd.sock");
  Process holder(directory,
                 {KVQ_HOLD_PATH,
                  "--restart-ms",
                  "1",
                  "--",
                  FAKE_DAEMON_PATH,
                  directory.path,
                  "store",
                  "kvq-root=garbage",
                  "store",
                  "kvq-old-1=x",
                  "store",
                  "other=y",
                  "die",
                  "--",
                  "become",
                  KVQD_PATH,
                  "--socket",
                  socket,
                  "--arena-bytes",
                  "16MiB",
                  "--slab-bytes",
                  "1MiB",
                  "--max-pages",
                  "4096",
                  "end"},
                 {"TMPDIR=" + directory.path});
  Ended status;
  for (int i = 0; i < kPatienceMs / 10 && status.exit_code != 0; ++i) {
    status = run(directory, {KVQCTL_PATH, "--socket", socket, "status"});
  }
  EXPECT_EQ(status.exit_code, 0) << holder.err();
  const Ended ended = holder.end(SIGTERM);
  EXPECT_EQ(ended.exit_code, 0) << ended.err;
  for (const char* text :
       {"event=adopt_refused why=\"", "descriptor other is neither a socket nor kvqd's", "event=ready"}) {
    EXPECT_NE(ended.err.find(text), std::string::npos) << text << " in\n" << ended.err;
  }
  EXPECT_EQ(ended.err.find("event=adopted"), std::string::npos) << ended.err;
}

TEST(HeldKvqdAlone, ItsRefusalToStartIsPassedOn) {
  Directory directory;
  EXPECT_EQ(run(directory, {KVQ_HOLD_PATH, "--", KVQD_PATH, "--nonsense"}).exit_code, 2);
  EXPECT_EQ(run(directory, {KVQ_HOLD_PATH, "--", KVQD_PATH, "--socket", directory.file("none/s")}).exit_code, 4);
}

}  // namespace
}  // namespace kvq

// kvqd and its service manager: the file read again at SIGHUP, figures in STATUS=, entries of the journal.
#include <sys/stat.h>

#include <memory>

#include "tests/e2e/process.h"

namespace kvq {
namespace {

using testing::Daemon;
using testing::Directory;
using testing::Ended;
using testing::run;

const std::string kTenant = "[[tenants]]\nname = \"chat\"\nuids = [0]\n";

class Reload : public ::testing::Test {
 protected:
  void start(const std::string& text) {
    file_ = directory_.write("kvqd.toml", text);
    daemon_ = std::make_unique<Daemon>(directory_, std::vector<std::string>{"--config", file_});
  }
  // The event's line that follows.
  std::string reload(const std::string& text) {
    directory_.write("kvqd.toml", text);
    const std::size_t before = daemon_->process->err().size();
    EXPECT_EQ(::kill(daemon_->process->pid, SIGHUP), 0);
    EXPECT_TRUE(daemon_->notify.hear("RELOADING=1\nMONOTONIC_USEC="));
    EXPECT_TRUE(daemon_->notify.hear("READY=1"));
    const std::string said = daemon_->process->err().substr(before);
    const auto begin = said.find("event=reload");
    return begin == std::string::npos ? said : said.substr(begin, said.find('\n', begin) - begin);
  }
  std::string ctl(std::vector<std::string> words) {
    words.insert(words.begin(), {KVQCTL_PATH, "--socket", daemon_->socket});
    const Ended ended = run(directory_, words);
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    return ended.out;
  }
  bool status_has(const std::string& text) { return ctl({"status", "--json"}).find(text) != std::string::npos; }

  Directory directory_;
  std::string file_;
  std::unique_ptr<Daemon> daemon_;
};

TEST_F(Reload, ChangesMarksQuotasSharesAndTheLogLevel) {
  start(kTenant);
  EXPECT_EQ(reload("quantize_at = 0.5\nlog_level = \"debug\"\n" + kTenant + "quota_bytes = \"2MiB\"\nshare = 3\n"),
            "event=reloaded changed=\"log_level quantize_at quota.chat share.chat\"");
  EXPECT_TRUE(status_has("\"quantize_at\": 0.5"));
  EXPECT_TRUE(status_has("\"quota_bytes\": 2097152"));
  EXPECT_TRUE(status_has("\"share\": 3"));
  EXPECT_EQ(reload(kTenant), "event=reloaded changed=\"log_level quantize_at quota.chat share.chat\"") << "defaults";
  EXPECT_EQ(reload(kTenant), "event=reloaded changed=\"\"");
}

TEST_F(Reload, GoesBackToTheFileFromWhatKvqctlSet) {
  start("evict_at = 0.8\n");
  ctl({"set", "evict_at", "0.9"});
  EXPECT_TRUE(status_has("\"evict_at\": 0.9"));
  EXPECT_EQ(reload("evict_at = 0.8\n"), "event=reloaded changed=\"evict_at\"");
  EXPECT_TRUE(status_has("\"evict_at\": 0.8"));
}

TEST_F(Reload, NamesWhatNeedsARestart) {
  start("max_sessions = 7\n" + kTenant);
  EXPECT_EQ(reload("step_deadline_ms = 500\nquantize_at = 0.6\n" + kTenant +
                   "format_floor = \"dense\"\n[[tenants]]\nname = \"new\"\nuids = [1]\n"),
            "event=reloaded changed=\"quantize_at\" needs_restart=\"max_sessions step_deadline_ms "
            "tenants.chat.format_floor tenants.new.name tenants.new.uids\"");
}

TEST_F(Reload, AFileThatIsRefusedChangesNothing) {
  start("quantize_at = 0.6\n");
  const std::string said = reload("quantize_at = 0.5\nevict_at = 0.4\n");
  EXPECT_EQ(said.find("event=reload_refused why="), 0u) << said;
  EXPECT_NE(said.find("kvqd.toml:2: evict_at = 0.4: watermarks must rise"), std::string::npos) << said;
  EXPECT_TRUE(status_has("\"quantize_at\": 0.6"));
  EXPECT_EQ(reload("quantize_at = 0.5\n"), "event=reloaded changed=\"quantize_at\"");
}

TEST(ServiceStatus, ShowsFiguresFromTheStartOn) {
  const Directory directory;
  testing::Notify notify(directory);
  const testing::Process process(
      directory, {KVQD_PATH, "--socket", directory.file("s"), "--arena-bytes", "16MiB", "--slab-bytes", "1MiB"},
      {notify.variable()});
  EXPECT_TRUE(notify.hear("READY=1\nSTATUS=0 sessions; host 0 % of 16.0 MiB, calm; new")) << process.err();
}

void claim_the_journal(int dev_of) {
  struct stat file {};
  ::fstat(dev_of, &file);
  ::setenv("JOURNAL_STREAM", (std::to_string(file.st_dev) + ":" + std::to_string(file.st_ino)).c_str(), 1);
}

// A line goes to the journal or down stderr, with its time; it is lost in neither case.
TEST(Journal, IsSpokenToOnlyWhereStderrIsItsAndItIsThere) {
  const Directory directory;
  const auto told = [&](const std::function<void()>& prepare) {
    testing::Notify notify(directory);
    testing::Process process(
        directory, {KVQD_PATH, "--socket", directory.file("s"), "--arena-bytes", "16MiB", "--slab-bytes", "1MiB"},
        {notify.variable()}, prepare);
    EXPECT_TRUE(notify.hear("READY=1"));
    return process.end(SIGTERM).err.find(" level=info event=ready ") != std::string::npos;
  };
  EXPECT_EQ(told([] { claim_the_journal(2); }), !std::filesystem::exists("/run/systemd/journal/socket"));
  EXPECT_TRUE(told([] { claim_the_journal(1); })) << "an inherited variable";
}

}  // namespace
}  // namespace kvq

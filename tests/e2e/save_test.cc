// kvqctl set --dry-run and --save: the real programs and a real file.
#include <sys/stat.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "tests/e2e/process.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using nlohmann::json;

constexpr char kConfig[] = R"(# of this node; kept by hand
evict_at = 0.85      # idle pages are dropped

[[tenants]]
name = "alpha"       # the chat
uids = [70001]
quota_bytes = "8MiB"

[[tenants]]
name = "beta"
uids = [70002]
share = 3
# the end, with a long line of what the next person who reads this should know about the two tenants above and why they share
)";

class Save : public ::testing::Test {
 protected:
  Ended ctl(
      std::vector<std::string> arguments, const std::function<void()>& prepare = [] {}) {
    arguments.insert(arguments.begin(), {KVQCTL_PATH, "--socket", daemon_->socket});
    return run(directory_, std::move(arguments), {}, prepare);
  }
  json document(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const Ended ended = ctl(std::move(arguments));
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    return json::parse(ended.out);
  }
  json setting(const std::string& key) {
    const json status = document({"status"});
    for (const json& s : status["settings"]) {
      if (s["key"] == key) return s;
    }
    return {};
  }
  void expect_refusal(const std::vector<std::string>& arguments, const std::string& text) {
    const Ended ended = ctl(arguments);
    EXPECT_EQ(ended.exit_code, 1);
    EXPECT_EQ(lines(ended.err), 1u) << ended.err;
    EXPECT_NE(ended.err.find(text), std::string::npos) << text << " in " << ended.err;
  }
  void restart(std::vector<std::string> options) {
    if (daemon_ != nullptr) daemon_->process->end(SIGTERM);
    daemon_ = std::make_unique<Daemon>(directory_, std::move(options));
  }
  static std::string with(std::string text, const std::string& old, const std::string& now) {
    return text.replace(text.find(old), old.size(), now);
  }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder_), {}));
  }

  Directory directory_;
  std::string folder_ = [this] {
    std::filesystem::create_directory(directory_.file("etc"));
    return directory_.file("etc");
  }();
  std::string config_ = directory_.write("etc/kvqd.toml", kConfig);
  std::unique_ptr<Daemon> daemon_ = std::make_unique<Daemon>(directory_, std::vector<std::string>{"--config", config_});
};

TEST_F(Save, StatusTellsWhatIsConfiguredAndWhatHolds) {
  EXPECT_EQ(document({"status"})["config_file"], config_);
  EXPECT_EQ(setting("quota.alpha"),
            json({{"key", "quota.alpha"}, {"value", 8 << 20}, {"configured", 8 << 20}, {"live", false}}));
  EXPECT_EQ(ctl({"status"}).out.find('*'), std::string::npos);
  ctl({"set", "quota.alpha", "4MiB"});
  ctl({"set", "evict_at", "0.8"});
  EXPECT_EQ(setting("quota.alpha"),
            json({{"key", "quota.alpha"}, {"value", 4 << 20}, {"configured", 8 << 20}, {"live", true}}));
  EXPECT_EQ(setting("evict_at")["configured"], 0.85);
  const std::string shown = ctl({"status"}).out;
  for (const char* text :
       {"evict at 80 %*", "4.0 MiB*", "* quota.alpha is 4.0 MiB until kvqd restarts or reloads; configured: 8.0"}) {
    EXPECT_NE(shown.find(text), std::string::npos) << text << " in\n" << shown;
  }
  EXPECT_EQ(setting("share.beta")["live"], false);
}

TEST_F(Save, ADryRunChangesNothing) {
  const Ended shown = ctl({"set", "evict_at", "0.8", "--dry-run", "--save"});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_NE(shown.out.find("nothing is changed"), std::string::npos) << shown.out;
  EXPECT_NE(shown.out.find("evict_at = 0.8      # idle pages are dropped"), std::string::npos) << shown.out;
  EXPECT_EQ(document({"set", "evict_at", "0.8", "--dry-run"})["dry_run"], true);
  EXPECT_EQ(setting("evict_at")["value"], 0.85);
  EXPECT_EQ(read_file(config_), kConfig);
  EXPECT_EQ(daemon_->process->err().find("event=set"), std::string::npos);
  expect_refusal({"set", "evict_at", "0.1", "--dry-run"}, "quantize_at <= evict_at");
  expect_refusal({"set", "quota.alpha", "1KiB", "--dry-run"}, "at least one slab");
}

TEST_F(Save, TheFileKeepsAllButTheLine) {
  ::chmod(config_.c_str(), 0640);
  const json saved = document({"set", "evict_at", "0.8", "--save"});
  EXPECT_EQ(saved["evict_at"], 0.8);
  EXPECT_EQ(saved["saved"]["file"], config_);
  EXPECT_EQ(read_file(config_), with(kConfig, "0.85", "0.8"));
  struct stat file {};
  ASSERT_EQ(::stat(config_.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 07777, 0640u);
  EXPECT_EQ(files(), 1u) << "nothing else is left in the folder";
  EXPECT_EQ(setting("evict_at"), json({{"key", "evict_at"}, {"value", 0.8}, {"configured", 0.8}, {"live", false}}));
  EXPECT_EQ(ctl({"set", "evict_at", "0.8", "--save"}).out.find("in "), std::string::npos);
  restart({"--config", config_});
  EXPECT_EQ(setting("evict_at"), json({{"key", "evict_at"}, {"value", 0.8}, {"configured", 0.8}, {"live", false}}));
}

TEST_F(Save, OfATenantInItsTable) {
  document({"set", "quota.alpha", "4MiB", "--save"});
  document({"set", "share.alpha", "5", "--save"});
  document({"set", "share.beta", "2", "--save"});
  EXPECT_EQ(setting("share.beta")["live"], false);
  EXPECT_EQ(setting("quota.alpha")["configured"], 4 << 20);
  std::string wanted = with(kConfig, "\"8MiB\"\n", "\"4MiB\"\nshare = 5\n");
  EXPECT_EQ(read_file(config_), with(wanted, "share = 3", "share = 2"));
  document({"set", "quota.alpha", "0", "--save"});
  EXPECT_NE(read_file(config_).find("# quota_bytes = \"4MiB\"\n"), std::string::npos);
  restart({"--config", config_});
  EXPECT_EQ(setting("share.alpha")["configured"], 5.0);
  EXPECT_EQ(setting("quota.alpha")["configured"], 0) << "the arena, as large as it is";
}

TEST_F(Save, ALinkStaysALink) {
  const std::string link = directory_.file("link.toml");
  std::filesystem::create_symlink(config_, link);
  restart({"--config", link});
  EXPECT_EQ(document({"set", "evict_at", "0.8", "--save"})["saved"]["file"], config_);
  EXPECT_TRUE(std::filesystem::is_symlink(link));
  EXPECT_EQ(read_file(link), with(kConfig, "0.85", "0.8"));
}

TEST_F(Save, WhatKvqdWouldNotStartWithIsNotSaved) {
  expect_refusal({"set", "share.alpha", "2.5", "--save"}, "share = 2.5: must be an integer from 1");
  EXPECT_EQ(read_file(config_), kConfig);
  EXPECT_EQ(setting("share.alpha")["value"], 2.5) << "the live change stands";
  directory_.write("etc/kvqd.toml", "evict_at = 0.85\nno setting\n");
  expect_refusal({"set", "evict_at", "0.8", "--save"}, "not valid TOML");
}

TEST_F(Save, AFailureLeavesTheOldFileAndSaysWhatHolds) {
  const auto small_files = [] {
    const rlimit limit{300, 300};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::signal(SIGXFSZ, SIG_IGN);
  };
  ASSERT_GT(sizeof(kConfig), 300u);
  const Ended ended = ctl({"set", "evict_at", "0.8", "--save"}, small_files);
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_NE(ended.err.find("not saved: cannot write"), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find("evict_at = 0.8 holds until kvqd restarts or reloads"), std::string::npos) << ended.err;
  EXPECT_EQ(read_file(config_), kConfig);
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(setting("evict_at")["value"], 0.8);
  std::filesystem::remove(config_);
  expect_refusal({"set", "evict_at", "0.81", "--save"}, "cannot find " + config_);
}

TEST_F(Save, WithoutAFileOrAgainstTheCommandLineItSaysWhatToDo) {
  restart({"--config", config_, "--quantize-at", "0.5"});
  expect_refusal({"set", "quantize_at", "0.6", "--save"}, "started with --quantize-at, which wins over");
  document({"set", "evict_at", "0.8", "--save"});
  restart({});
  EXPECT_EQ(document({"status"})["config_file"], "");
  expect_refusal({"set", "quantize_at", "0.6", "--save"}, "start it with --config");
  EXPECT_EQ(setting("quantize_at")["live"], true);
  expect_refusal({"set", "quantize_at", "0.99", "--save"}, "quantize_at = 0.99 is not valid");
}

}  // namespace
}  // namespace kvq

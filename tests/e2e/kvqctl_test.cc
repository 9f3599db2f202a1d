// The real kvqctl against the real kvqd: each verb for eyes and as JSON, and each way to fail.
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "tests/e2e/process.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using nlohmann::json;

class Kvqctl : public ::testing::Test {
 protected:
  Ended ctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {KVQCTL_PATH, "--socket", daemon_.socket});
    return run(directory_, std::move(arguments));
  }
  json document(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const Ended ended = ctl(std::move(arguments));
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    EXPECT_EQ(ended.err, "");
    return json::parse(ended.out);
  }
  void expect_failure(std::vector<std::string> arguments, int exit_code, const std::string& text) {
    const Ended ended = ctl(std::move(arguments));
    EXPECT_EQ(ended.exit_code, exit_code) << ended.err;
    EXPECT_EQ(ended.out, "");
    EXPECT_EQ(lines(ended.err), 1u) << ended.err;
    EXPECT_EQ(ended.err.rfind("kvqctl: ", 0), 0u) << ended.err;
    EXPECT_NE(ended.err.find(text), std::string::npos) << text << " in " << ended.err;
  }

  Directory directory_;
  std::string config_ = directory_.write("kvqd.toml", R"(
[[tenants]]
name = "alpha"
uids = [70001]
quota_bytes = "8MiB"

[[tenants]]
name = "beta"
uids = [70002]
share = 3
)");
  Daemon daemon_{directory_, {"--config", config_}};
};

TEST_F(Kvqctl, StatusShowsArenaAndTenants) {
  const json status = document({"status"});
  EXPECT_EQ(status["arena"]["bytes"], 16 << 20);
  EXPECT_EQ(status["arena"]["slabs"], 16);
  EXPECT_EQ(status["level"], "calm");
  EXPECT_EQ(status["pid"], daemon_.process->pid);
  EXPECT_EQ(status["tenants"].size(), 2u);
  const Ended shown = ctl({"status"});
  EXPECT_EQ(shown.exit_code, 0);
  for (const char* text : {"16.0 MiB in slabs of 1.0 MiB", "quantize at 70 %", "alpha", "beta", "8.0 MiB"}) {
    EXPECT_NE(shown.out.find(text), std::string::npos) << text << " in\n" << shown.out;
  }
}

TEST_F(Kvqctl, ListsAreTablesAndDocuments) {
  EXPECT_EQ(document({"tenants"})["tenants"][1]["share"], 3.0);
  EXPECT_EQ(document({"sessions"})["sessions"], json::array());
  EXPECT_EQ(document({"pages", "--tenant", "alpha", "--limit", "5"})["pages"], json::array());
  EXPECT_EQ(ctl({"tenants"}).out.rfind("TENANT", 0), 0u);
  EXPECT_EQ(ctl({"sessions"}).out, "no sessions\n");
  EXPECT_EQ(ctl({"pages"}).out, "no pages\n");
  EXPECT_EQ(document({"sequences", "--tenant", "alpha"})["sequences"], json::array());
  EXPECT_EQ(document({"prefix", "--tenant", "beta", "--device", "host"})["tenants"].size(), 1u);
  EXPECT_EQ(ctl({"sequences"}).out, "no sequences\n");
  EXPECT_NE(ctl({"prefix"}).out.find("no chain is cached"), std::string::npos);
}

TEST_F(Kvqctl, QuantizeSaysWhatItDoes) {
  EXPECT_EQ(document({"quantize", "--dry-run", "--idle", "100"})["dry_run"], true);
  EXPECT_EQ(document({"quantize", "--tenant", "alpha"})["pages"], 0);
  EXPECT_NE(ctl({"quantize", "--dry-run"}).out.find("would quantize 0 pages"), std::string::npos);
}

TEST_F(Kvqctl, EvictAndCompactSayWhatTheyDo) {
  EXPECT_EQ(document({"evict", "--dry-run", "--idle", "100"}),
            json::parse(R"({"dry_run": true, "pages": 0, "bytes": 0})"));
  EXPECT_EQ(document({"evict", "--tenant", "alpha"})["dry_run"], false);
  EXPECT_EQ(ctl({"evict"}).out, "dropping 0 cached pages: 0 B\n");
  EXPECT_EQ(document({"compact", "--dry-run"}),
            json::parse(R"({"dry_run": true, "pages": 0, "bytes": 0, "slabs": 0})"));
  EXPECT_EQ(ctl({"compact", "--tenant", "beta", "--dry-run"}).out, "would move 0 pages (0 B), which empties 0 slabs\n");
  EXPECT_EQ(ctl({"events"}).out.find("event=compact_asked"), std::string::npos) << "a dry run is no event";
  expect_failure({"evict", "--tenant", "gamma"}, 1, "known: alpha, beta");
  expect_failure({"compact", "--tenant", "gamma"}, 1, "known: alpha, beta");
}

TEST_F(Kvqctl, ResizeChangesTheArenaOfARunningKvqd) {
  EXPECT_EQ(document({"resize", "8MiB", "--dry-run"})["arena_bytes_before"], 16 << 20);
  EXPECT_EQ(document({"status"})["arena"]["bytes"], 16 << 20);
  EXPECT_EQ(ctl({"resize", "32MiB"}).out, "resized the arena of host from 16.0 MiB to 32.0 MiB: 0 slabs are in use\n");
  const json arena = document({"status"})["arena"];
  EXPECT_EQ(arena["bytes"], 32 << 20);
  EXPECT_EQ(arena["target_bytes"], 32 << 20);
  EXPECT_EQ(arena["start_bytes"], 16 << 20);
  EXPECT_EQ(arena["slabs_over"], 0);
  EXPECT_GE(arena["most_bytes"], 32 << 20);
  expect_failure({"resize", "1500KiB"}, 1, "2MiB at least");
  expect_failure({"resize", "5000KiB"}, 1, "so 4MiB or 5MiB");
  expect_failure({"resize", "1TiB"}, 1, "were reserved at the start");
  expect_failure({"resize", "8MiB", "--device", "GPU-1"}, 1, "GPU-1");
  expect_failure({"resize", "much"}, 2, "SIZE = much");
  expect_failure({"resize"}, 2, "size");
}

TEST_F(Kvqctl, SettingsTakeEffectAtOnce) {
  EXPECT_EQ(document({"set", "quantize_at", "0.4"})["quantize_at"], 0.4);
  EXPECT_EQ(document({"set", "quota.alpha", "4MiB"})["quota_bytes"], 4 << 20);
  EXPECT_EQ(document({"set", "share.beta", "2"})["share"], 2.0);
  const json status = document({"status"});
  EXPECT_EQ(status["watermarks"]["quantize_at"], 0.4);
  EXPECT_EQ(status["tenants"][0]["quota_bytes"], 4 << 20);
  EXPECT_EQ(status["tenants"][1]["share"], 2.0);
}

TEST_F(Kvqctl, WhatTheDaemonRefusesIsOneLineWithTheFix) {
  expect_failure({"set", "quantize_at", "0.99"}, 1, "quantize_at <= evict_at");
  expect_failure({"set", "quantise_at", "0.5"}, 1, "use quantize_at");
  expect_failure({"set", "quota.gamma", "1MiB"}, 1, "known: alpha, beta");
  expect_failure({"set", "quota.alpha", "some"}, 1, "quota.alpha = some");
  expect_failure({"pages", "--tenant", "gamma"}, 1, "gamma");
  expect_failure({"quantize", "--tenant", "gamma"}, 1, "gamma");
  expect_failure({"sequences", "--session", "7"}, 1, "no session 7; kvqctl sessions lists them");
  expect_failure({"prefix", "--device", "GPU-1"}, 1, "no device is called \"GPU-1\"");
}

TEST_F(Kvqctl, VerifySaysWhatItFound) {
  const json report = document({"verify", "--tenant", "alpha"});
  EXPECT_EQ(report["finished"], true);
  EXPECT_EQ(report["tenant"], "alpha");
  EXPECT_EQ(report["bad"], 0);
  EXPECT_EQ(ctl({"verify"}).out, "verified 0 of 0 pages: 0 bad\n");
  expect_failure({"verify", "--tenant", "gamma"}, 1, "known: alpha, beta");
}

TEST_F(Kvqctl, EvictingNamesASessionThatDoesNotExist) {
  expect_failure({"evict-session", "99", "--kill"}, 1, "no session 99");
  expect_failure({"evict-session"}, 2, "session");
}

TEST_F(Kvqctl, BadCommandLinesAreRefused) {
  expect_failure({"stats"}, 2, "stats");
  expect_failure({}, 2, "no verb");
  expect_failure({"set", "quantize_at"}, 2, "value");
  expect_failure({"pages", "--limit", "-3"}, 2, "--limit");
  expect_failure({"prefix", "--limit", "1001"}, 2, "--limit");
  expect_failure({"bench", "--seconds", "0"}, 2, "--seconds");
  expect_failure({"status", "--watch", "soon"}, 2, "--watch");
}

TEST_F(Kvqctl, AMissingDaemonIsNamedWithTheSocket) {
  const Ended absent = run(directory_, {KVQCTL_PATH, "status"}, {"KVQ_SOCKET=" + directory_.file("nothing.sock")});
  EXPECT_EQ(absent.exit_code, 3);
  EXPECT_NE(absent.err.find("nothing.sock"), std::string::npos) << absent.err;
  EXPECT_NE(absent.err.find("start kvqd"), std::string::npos);
  const Ended by_variable = run(directory_, {KVQCTL_PATH, "status"}, {"KVQ_SOCKET=" + daemon_.socket});
  EXPECT_EQ(by_variable.exit_code, 0) << by_variable.err;
  daemon_.process->end(SIGKILL);
  expect_failure({"status"}, 3, "no daemon at");
}

TEST_F(Kvqctl, ListsCanBeWatched) {
  Process watching(directory_, {KVQCTL_PATH, "--socket", daemon_.socket, "prefix", "--watch", "0.1"});
  while (lines(watching.out()) < 10) ::usleep(10'000);  // two of five lines each
  const Ended ended = watching.end(SIGTERM);
  EXPECT_EQ(ended.out.find('\033'), std::string::npos) << "a screen is cleared only on a terminal";
}

TEST_F(Kvqctl, EventsAreTheLinesOfTheLog) {
  ctl({"set", "quantize_at", "0.4"});
  const Ended shown = ctl({"events"});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_NE(shown.out.find("event=ready socket="), std::string::npos) << shown.out;
  std::istringstream out(shown.out);
  for (std::string line; std::getline(out, line);) {
    const std::string event = line.substr(line.find(' ') + 1);
    EXPECT_NE(daemon_.process->err().find(event), std::string::npos) << event;
  }
  const Ended last = ctl({"events", "--limit", "1", "--json"});
  const json event = json::parse(last.out);
  EXPECT_EQ(event["fields"]["event"], "set");
  EXPECT_EQ(event["fields"]["value"], "0.4");
  EXPECT_LT(event["age_ms"], 60'000);
  EXPECT_EQ(event["time"].get<std::string>().substr(0, 2), "20");
}

TEST_F(Kvqctl, EventsAreFollowedOverARestart) {
  Process following(directory_, {KVQCTL_PATH, "--socket", daemon_.socket, "events", "--follow"});
  const auto await = [&](const std::string& text) {
    for (int i = 0; i < kPatienceMs / 10 && following.out().find(text) == std::string::npos; ++i) ::usleep(10'000);
    EXPECT_NE(following.out().find(text), std::string::npos) << text << " in\n" << following.out() << following.err();
  };
  await("event=ready");
  ctl({"set", "share.beta", "2"});
  await("event=set key=share.beta value=2");
  daemon_.process->end(SIGKILL);
  Daemon next(directory_, {"--config", config_});
  ctl({"set", "share.beta", "5"});
  await("event=set key=share.beta value=5");
  const Ended ended = following.end(SIGTERM);
  EXPECT_NE(ended.err.find("waiting for kvqd"), std::string::npos) << ended.err;
  std::size_t ready = 0;
  for (std::size_t at = ended.out.find("event=ready"); at != std::string::npos;
       at = ended.out.find("event=ready", at + 1))
    ++ready;
  EXPECT_EQ(ready, 2u) << ended.out;
  expect_failure({"events", "--limit", "1001"}, 2, "--limit");
}

TEST_F(Kvqctl, ADryRunChangesNothing) {
  EXPECT_EQ(ctl({"drain", "--dry-run"}).out, "would wait for 0 sessions, and end kvqd\n");
  expect_failure({"evict-session", "7", "--dry-run"}, 1, "no session 7");
  EXPECT_EQ(document({"status"})["draining"], false);
}

TEST_F(Kvqctl, TheDoctorSeesARunningKvqd) {
  const Ended ended = ctl({"doctor", "--json"});
  const json report = json::parse(ended.out);
  EXPECT_EQ(ended.exit_code, report["ok"] == true ? 0 : 5) << ended.out;
  std::map<std::string, json> by_check;
  for (const json& f : report["findings"]) by_check[f["check"]] = f;
  EXPECT_EQ(by_check["socket"]["verdict"], "ok");
  EXPECT_NE(by_check["kvqd"]["text"].get<std::string>().find("pid " + std::to_string(daemon_.process->pid)),
            std::string::npos);
  EXPECT_NE(by_check["limit of open files"]["text"].get<std::string>().find("kvqd may open"), std::string::npos);
  EXPECT_EQ(by_check["device host"]["verdict"], "ok");
}

TEST_F(Kvqctl, TheDoctorNeedsNoKvqd) {
  daemon_.process->end(SIGKILL);
  const Ended left = ctl({"doctor"});
  EXPECT_EQ(left.exit_code, 5);
  EXPECT_NE(left.out.find("BAD   kvqd: no daemon at"), std::string::npos) << left.out;
  EXPECT_EQ(lines(left.err), 1u) << left.err;
  const Ended none = run(directory_, {KVQCTL_PATH, "doctor"}, {"KVQ_SOCKET=/nowhere/kvqd.sock"});
  EXPECT_EQ(none.exit_code, 5);
  EXPECT_NE(none.out.find("the folder of /nowhere/kvqd.sock does not exist"), std::string::npos) << none.out;
  EXPECT_NE(none.out.find("fix: "), std::string::npos);
  const Ended file = run(directory_, {KVQCTL_PATH, "doctor"}, {"KVQ_SOCKET=" + directory_.write("file", "")});
  EXPECT_NE(file.out.find("is no socket"), std::string::npos) << file.out;
}

TEST_F(Kvqctl, WatchShowsAgainUntilTheDaemonEnds) {
  Process watching(directory_, {KVQCTL_PATH, "--socket", daemon_.socket, "status", "--watch", "0.1", "--json"});
  document({"status"});
  EXPECT_EQ(daemon_.process->end(SIGTERM).exit_code, 0);
  const Ended ended = watching.wait();
  EXPECT_EQ(ended.exit_code, 3) << ended.err;
}

}  // namespace
}  // namespace kvq

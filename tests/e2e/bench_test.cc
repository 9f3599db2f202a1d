// kvqctl bench against a real kvqd: what it measures, that its answers are right, that nothing is left and nobody is
// pushed out.
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/e2e/process.h"
#include "tools/kvq-bench/content.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using nlohmann::json;

const std::set<std::string> kFromTheTenantAlone = {"quantize", "decode_quantized", "attach"};

class Bench : public ::testing::Test {
 protected:
  Ended ctl(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {KVQCTL_PATH, "--socket", daemon_->socket});
    return run(directory_, std::move(arguments));
  }
  json document(std::vector<std::string> arguments) {
    arguments.push_back("--json");
    const Ended ended = ctl(std::move(arguments));
    EXPECT_EQ(ended.exit_code, 0) << ended.err;
    return json::parse(ended.out);
  }
  void start(std::vector<std::string> options) {
    daemon_.reset();
    daemon_ = std::make_unique<Daemon>(directory_, std::move(options));
  }
  static std::set<std::string> names(const json& list) {
    std::set<std::string> out;
    for (const json& entry : list) out.insert(entry["name"]);
    return out;
  }

  Directory directory_;
  std::unique_ptr<Daemon> daemon_ = std::make_unique<Daemon>(directory_);
};

TEST_F(Bench, MeasuresGetsRightAnswersAndLeavesNothing) {
  const json report = document({"bench", "--seconds", "0.5"});
  std::set<std::string> all = names(report["results"]);
  for (const char* name :
       {"call", "call_p99", "allocate", "copy", "copy_one", "append", "decode_dense", "quantize", "decode_quantized"}) {
    EXPECT_EQ(all.count(name), 1u) << name << " is missing; skipped: " << report["skipped"];
  }
  for (const json& row : report["results"]) EXPECT_GT(row["value"], 0.0) << row;
  EXPECT_EQ(report["answers_right"], true) << report["results"];
  EXPECT_EQ(report["left_bytes"], 0);
  EXPECT_GE(report["bytes"], 2 << 20);
  all.merge(names(report["skipped"]));
  EXPECT_EQ(all.count("attach"), 1u);
  const json status = document({"status"});
  EXPECT_EQ(status["sessions"], 0);
  EXPECT_EQ(status["arena"]["slabs_used"], 0);
  EXPECT_EQ(status["level"], "calm");
  EXPECT_EQ(daemon_->process->err().find("event=pressure"), std::string::npos);
  const Ended shown = ctl({"bench", "--seconds", "0.5"});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_NE(shown.out.find("answers are right"), std::string::npos) << shown.out;
}

TEST_F(Bench, WithoutRoomItStartsNothing) {
  start({"--quantize-at", "0.1", "--relief", "0.05"});
  const Ended ended = ctl({"bench"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_EQ(lines(ended.err), 1u) << ended.err;
  EXPECT_NE(ended.err.find("no room: the arena has less than"), std::string::npos) << ended.err;
  EXPECT_EQ(document({"tenants"})["tenants"], json::array()) << "not even a session was made";
}

TEST_F(Bench, WhatOthersOfTheTenantCachedStaysAsItIs) {
  const auto cached = [&] {
    const json tenants = document({"tenants"})["tenants"];
    return tenants.empty() ? 0 : tenants[0]["sealed_pages"].get<int>();
  };
  {
    Process load(directory_, {KVQ_LOAD_PATH, daemon_->socket, "1", "5"}, {}, [] {
      int ends[2];  // input that does not end
      if (::pipe(ends) == 0) ::dup2(ends[0], 0);
    });
    for (int i = 0; i < kPatienceMs / 50 && cached() < 20; ++i) ::usleep(50'000);
    load.end(SIGTERM);
  }
  for (int i = 0; i < kPatienceMs / 50 && document({"status"})["sessions"] != 0; ++i) ::usleep(50'000);
  const int before = cached();
  ASSERT_GE(before, 20);
  const json report = document({"bench", "--seconds", "0.5"});
  EXPECT_EQ(names(report["skipped"]), kFromTheTenantAlone);
  EXPECT_EQ(report["answers_right"], true);
  EXPECT_EQ(report["left_bytes"], 0);
  const json status = document({"status"});
  EXPECT_EQ(status["transcodes"]["done"], 0);
  EXPECT_EQ(status["dropped_pages"], 0);
  EXPECT_EQ(cached(), before);
}

TEST_F(Bench, WhoBelongsToNoTenantIsToldSo) {
  start({"--config", directory_.write("kvqd.toml", "[[tenants]]\nname = \"a\"\nuids = [70001]\n")});
  const Ended ended = ctl({"bench"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_NE(ended.err.find("permission_denied"), std::string::npos) << ended.err;
  daemon_->process->end(SIGKILL);
  EXPECT_EQ(ctl({"bench"}).exit_code, 3);
}

TEST_F(Bench, AMissingProgramIsNamed) {
  const std::string alone = directory_.file("kvqctl");
  std::filesystem::copy_file(KVQCTL_PATH, alone);
  const Ended ended = run(directory_, {alone, "--socket", daemon_->socket, "bench"});
  EXPECT_EQ(ended.exit_code, 1);
  EXPECT_NE(ended.err.find("install kvq-bench"), std::string::npos) << ended.err;
}

TEST(BenchContent, WrongAnswersAreNoticed) {
  const kvq_bench::Content content(128);
  std::vector<float> out(kvq_bench::kQueryHeads * kvq_bench::kHeadDim);
  EXPECT_GT(kvq_bench::worst_error(content, out), 0.5) << "channel 0 is -0.9375 in every token, and 0 is no answer";
  for (std::size_t i = 0; i < out.size(); i += kvq_bench::kHeadDim) out[i] = -0.9375f, out[i + 1] = 0.9375f;
  const double almost = kvq_bench::worst_error(content, out);
  EXPECT_LT(almost, 0.9375);
  out[5] = NAN;
  EXPECT_EQ(kvq_bench::worst_error(content, out), INFINITY);
}

}  // namespace
}  // namespace kvq

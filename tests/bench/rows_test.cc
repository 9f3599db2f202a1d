// The writer of result files: which members a file has, what its numbers are, and that none is lost in silence.
#include "tests/bench/rows.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "tests/bench/arguments.h"

namespace kvq::bench {
namespace {

namespace fs = std::filesystem;

const About kAbout = {"decode", "a GPU", "CUDA 13.0", "2026-11-30", "abc1234", "program --tokens 3"};

struct Folder {
  Folder() : path(fs::temp_directory_path() / ("kvq-rows-" + std::to_string(::getpid()))) {
    fs::create_directories(path);
  }
  ~Folder() { fs::remove_all(path); }
  std::size_t files() const { return static_cast<std::size_t>(std::distance(fs::directory_iterator(path), {})); }
  const fs::path path;
};

nlohmann::json read(const fs::path& path) { return nlohmann::json::parse(std::ifstream(path)); }

std::string refusal(const std::string& path) {
  try {
    Rows(kAbout, path).write();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(Rows, AFileSaysWhoMeasuredWhatWhere) {
  const Folder folder;
  Rows rows(kAbout, folder.path / "decode.json");
  rows.ceiling("read_tb_s", 4.5);
  rows.times("step", "8x1", {3, 1, 2}, {{"bytes", 7}});
  rows.value("pages", "all", 12, "pages");
  rows.document("churn", "none", {{"sequences", 4}});
  EXPECT_EQ(folder.files(), 0u);  // whole or not there
  rows.write();
  EXPECT_EQ(folder.files(), 1u);
  const nlohmann::json step = {{"name", "step"}, {"shape", "8x1"}, {"median_us", 2.0},
                               {"p99_us", 3.0},  {"samples", 3},   {"bytes", 7}};
  const nlohmann::json pages = {{"name", "pages"}, {"shape", "all"}, {"value", 12.0}, {"unit", "pages"}};
  const nlohmann::json churn = {{"name", "churn"}, {"shape", "none"}, {"sequences", 4}};
  const nlohmann::json whole = {{"topic", "decode"},
                                {"device", "a GPU"},
                                {"driver", "CUDA 13.0"},
                                {"date", "2026-11-30"},
                                {"commit", "abc1234"},
                                {"command", "program --tokens 3"},
                                {"ceilings", {{"read_tb_s", 4.5}}},
                                {"rows", {step, pages, churn}}};
  EXPECT_EQ(read(folder.path / "decode.json"), whole);
}

TEST(Rows, AQuantileIsOneOfTheSamples) {
  std::vector<double> hundred;
  for (int i = 100; i > 0; --i) hundred.push_back(i);
  EXPECT_EQ(quantile(hundred, 0.5), 51);
  EXPECT_EQ(quantile(hundred, 0.99), 100);
  EXPECT_EQ(quantile(hundred, 0), 1);
  EXPECT_EQ(quantile(hundred, 1), 100);
  EXPECT_EQ(quantile({7}, 0.99), 7);
  EXPECT_EQ(quantile({2, 1}, 0.5), 2);
  EXPECT_EQ(quantile({}, 0.5), 0);
}

TEST(Rows, ADriverHasTheNameThatPeopleKnow) {
  EXPECT_EQ(driver_name(13000), "CUDA 13.0");
  EXPECT_EQ(driver_name(12080), "CUDA 12.8");
}

TEST(Rows, AFileThatCannotBeWrittenIsAnErrorWithItsNameBeforeTheFirstRow) {
  const Folder folder;
  const std::string missing = folder.path / "missing" / "decode.json";
  EXPECT_EQ(refusal(missing), missing + " cannot be written: No such file or directory");
  EXPECT_THROW(Rows(kAbout, missing), std::runtime_error);
  fs::create_directories(folder.path / "taken" / "inside");  // a folder has the file's name
  const std::string taken = folder.path / "taken";
  EXPECT_EQ(refusal(taken), taken + " cannot be written: Is a directory");
  EXPECT_EQ(folder.files(), 1u);  // nothing of the draft is left
}

TEST(Rows, WhatWasThereStaysUntilTheNextIsWhole) {
  const Folder folder;
  const fs::path path = folder.path / "decode.json";
  std::ofstream(path) << "{\"topic\": \"old\"}";
  {
    Rows rows(kAbout, path);
    rows.value("pages", "all", 12, "pages");
  }
  EXPECT_EQ(read(path)["topic"], "old");
  EXPECT_EQ(folder.files(), 1u);
}

TEST(Rows, AFullDiskIsAnError) {
  const Folder folder;
  const std::string path = folder.path / "decode.json";
  const Rows rows(kAbout, path);
  fs::create_symlink("/dev/full", path + ".new");
  EXPECT_THROW(rows.write(), std::runtime_error);
  EXPECT_EQ(folder.files(), 0u);
}

TEST(Rows, WithoutAPathThereIsNoFile) {
  const Rows rows(kAbout, "");
  EXPECT_NO_THROW(rows.write());
}

TEST(Rows, WhatIsNoNumberIsRefused) {
  Rows rows(kAbout, "");
  EXPECT_THROW(rows.value("ratio", "all", std::nan(""), "ratio"), std::runtime_error);
  EXPECT_THROW(rows.document("ratio", "all", {{"of", nullptr}}), std::runtime_error);
  EXPECT_TRUE(rows.json()["rows"].empty());
}

TEST(Arguments, SayHowToGetTheResultAgain) {
  const char* words[] = {"p", "--tokens", "3", "--out", "/tmp/x.json", "--commit", "abc"};
  const Arguments arguments(7, words);
  EXPECT_EQ(arguments.command("program"), "program --tokens 3 --commit abc");
  EXPECT_EQ(arguments.text("out"), "/tmp/x.json");
  EXPECT_EQ(arguments.number("tokens", 5), 3u);
  EXPECT_EQ(arguments.number("pages", 5), 5u);
  EXPECT_THROW(arguments.number("commit", 0), std::invalid_argument);
}

TEST(Arguments, WhatIsNotUnderstoodIsAnError) {
  const char* dangling[] = {"p", "--tokens"};
  EXPECT_THROW(Arguments(2, dangling), std::invalid_argument);
  const char* word[] = {"p", "tokens", "3"};
  EXPECT_THROW(Arguments(3, word), std::invalid_argument);
}

}  // namespace
}  // namespace kvq::bench

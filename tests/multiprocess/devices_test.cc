// Several GPUs under one kvqd: nothing of one is anybody else's business. The GPUs are workers without one.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "tests/multiprocess/reconnect.h"
#include "tests/support/daemon_process.h"
#include "tests/support/held_daemon.h"
#include "tests/support/programs.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using nlohmann::json;

constexpr const char* kA = "GPU-aaaaaaaa-0000-0000-0000-000000000001";
constexpr const char* kB = "GPU-bbbbbbbb-0000-0000-0000-000000000002";

class Devices : public ::testing::Test {
 protected:
  Devices() {
    char pattern[] = "/tmp/kvq-gpus-XXXXXX";
    directory_ = ::mkdtemp(pattern);
    environment_ = {"KVQ_FAKE_GPUS=" + directory_ + "/gpus"};
    show({kA, kB});
  }
  ~Devices() override { std::filesystem::remove_all(directory_); }

  // What the driver shows from now on: a UUID each, with faults behind it.
  void show(const std::vector<std::string>& lines) const {
    std::ofstream file(directory_ + "/gpus.new");
    for (const std::string& line : lines) file << line << "\n";
    file.close();
    std::filesystem::rename(directory_ + "/gpus.new", directory_ + "/gpus");
  }
  HeldDaemon& start(const std::string& device = "\"cuda\"", const std::string& more = "") {
    daemon_ = std::make_unique<HeldDaemon>(calm_settings() + "device = " + device + "\n--gpu-worker=" +
                                               program_path(FAKE_GPU_WORKER_PATH) + "\n" + more,
                                           environment_);
    return *daemon_;
  }
  std::unique_ptr<TinyModel> model(const char* device, kvq_role role = KVQ_ROLE_BOTH) const {
    ModelOptions options;
    options.device = device;
    options.role = role;
    return std::make_unique<TinyModel>(daemon_->socket(), options);
  }
  // The words of a kvqctl call, and its exit code.
  std::string ctl(const std::string& arguments, int* exit_code = nullptr) const {
    const std::string command =
        program_path(KVQCTL_PATH) + " --socket " + daemon_->socket() + " " + arguments + " 2>&1";
    std::string out;
    std::FILE* pipe = ::popen(command.c_str(), "r");
    char piece[4096];
    for (std::size_t got; (got = std::fread(piece, 1, sizeof piece, pipe)) > 0;) out.append(piece, got);
    const int status = ::pclose(pipe);
    if (exit_code != nullptr) *exit_code = WEXITSTATUS(status);
    return out;
  }
  json document(const std::string& arguments) const { return json::parse(ctl(arguments + " --json")); }
  // Of the session on that device; 0: none.
  std::uint32_t session_on(const std::string& device) const {
    const json sessions = document("sessions");
    for (const json& s : sessions["sessions"]) {
      if (s["device"] == device) return s["id"];
    }
    return 0;
  }
  pid_t worker_of(const std::string& uuid) const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      std::ifstream file(entry.path() / "cmdline");
      const std::string line((std::istreambuf_iterator<char>(file)), {});
      if (line.find(uuid) == std::string::npos || line.find("fake_gpu_worker") == std::string::npos) continue;
      std::ifstream stat(entry.path() / "stat");
      std::string word;
      for (int i = 0; i < 4; ++i) stat >> word;
      if (word == std::to_string(daemon_->pid())) return std::stoi(name);
    }
    return 0;
  }

  std::string directory_;
  std::vector<std::string> environment_;
  std::unique_ptr<HeldDaemon> daemon_;
};

void expect_exact(TinyModel& tiny, Sequence& sequence, std::int32_t length) {
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), length, 1, test_seed()).exact, 1u);
}

// What a call says once the session is known to be lost: until then the magazine may still serve it.
kvq_status status_once_lost(TinyModel& tiny) {
  kvq_status status = KVQ_OK;
  for (int i = 0; i < 2000 && status == KVQ_OK; ++i) {
    status = kvq_credits_request(tiny.get(), 1, 5000);
    ::usleep(10'000);  // what is awaited has no event
  }
  return status;
}

// Each worker of this test is silent until the other runs.
TEST_F(Devices, AllWorkersAreStartedBeforeKvqdWaitsForOne) {
  environment_.push_back("KVQ_FAKE_GPUS_MEET=" + directory_ + "/started");
  start();
  EXPECT_EQ(std::filesystem::file_size(directory_ + "/started"), 2u);
  EXPECT_EQ(document("status")["devices"].size(), 2u);
}

TEST_F(Devices, SameTokensOnTwoShareNothingAndEachIsShown) {
  start();
  const auto a = model(kA), b = model(kB), again = model(kA);
  const auto tokens = token_stream(1, 300);
  Sequence on_a = a->model().open({}), on_b = b->model().open({});
  a->write(on_a, 0, tokens);
  a->await_cached(tokens, 256);
  again->await_cached(tokens, 256);
  EXPECT_EQ(b->model().lookup(tokens).cached_tokens, 0u);
  EXPECT_EQ(b->model().open(tokens).info().committed_tokens, 0u);
  b->write(on_b, 0, tokens);
  b->await_cached(tokens, 256);
  expect_exact(*a, on_a, 300);
  expect_exact(*b, on_b, 300);

  const json status = document("status");
  ASSERT_EQ(status["devices"].size(), 2u) << status;
  EXPECT_EQ(status["sessions"], 3);
  EXPECT_EQ(status["devices"][0]["name"], kA);
  EXPECT_EQ(status["devices"][0]["sessions"], 2);
  EXPECT_EQ(status["devices"][1]["device_health"]["uuid"], kB);
  EXPECT_NE(status["devices"][0]["instance"], status["devices"][1]["instance"]);
  EXPECT_GT(status["devices"][1]["tenants"][0]["page_bytes"], 0);
  const std::string shown = ctl("status");
  for (const char* part : {kA, kB, "3 on 2 devices"}) EXPECT_NE(shown.find(part), std::string::npos) << shown;
  EXPECT_NE(ctl("sessions").find("DEVICE"), std::string::npos);
  EXPECT_NE(ctl("tenants").find(kB), std::string::npos);

  const auto pages = document("pages")["pages"].size(),
             pages_of_b = document(std::string("pages --device ") + kB)["pages"].size();
  EXPECT_GT(pages_of_b, 0u);
  EXPECT_GT(pages, pages_of_b);
  EXPECT_NE(ctl("pages --device GPU-9").find("no device is called"), std::string::npos);
  const json verified = document("verify");
  EXPECT_EQ(verified["finished"], true);
  EXPECT_EQ(verified["pages"], 8) << "four full pages on each";
  { const Sequence first = std::move(on_a), second = std::move(on_b); }
  a->await("for both to be released", [&] { return document("quantize --dry-run")["pages"] == 8; });
  EXPECT_EQ(document("set quantize_at 0.5")["quantize_at"], 0.5);
  const json changed = document("status");
  for (const json& device : changed["devices"]) EXPECT_EQ(device["watermarks"]["quantize_at"], 0.5);
}

TEST_F(Devices, ASessionIsEvictedByItsNumberAndNoOtherNoticesIt) {
  start();
  const auto a = model(kA), b = model(kB);
  Sequence on_a = a->model().open({});
  a->write(on_a, 0, token_stream(1, 100));
  const std::uint32_t number_a = session_on(kA), number_b = session_on(kB);
  EXPECT_EQ(number_a, 1u);
  EXPECT_GT(number_b, 1u << 20) << "numbers of another device are of another range";
  EXPECT_EQ(document("evict-session " + std::to_string(number_b))["session"], number_b);
  a->await("for the eviction", [&] { return session_on(kB) == 0; });
  EXPECT_NE(kvq_credits_request(b->get(), 1, 2000), KVQ_OK);
  a->write(on_a, 100, token_stream(2, 100));
  expect_exact(*a, on_a, 200);
  int exit_code = 0;
  EXPECT_NE(ctl("evict-session 77", &exit_code).find("there is no session 77"), std::string::npos);
  EXPECT_EQ(exit_code, 1);
}

TEST_F(Devices, AWorkerThatDiesIsItsOwnDevicesTrouble) {
  start();
  const auto a = model(kA), b = model(kB);
  Sequence on_a = a->model().open({}), on_b = b->model().open({});
  a->write(on_a, 0, token_stream(1, 100));
  b->write(on_b, 0, token_stream(1, 100));
  const pid_t worker_a = worker_of(kA), worker_b = worker_of(kB);
  ASSERT_GT(worker_a, 0);
  ASSERT_GT(worker_b, 0);
  ASSERT_EQ(::kill(worker_b, SIGKILL), 0);
  std::uint64_t length = 100;
  for (bool back = false; !back;) {
    a->write(on_a, length, token_stream(static_cast<std::uint32_t>(length), 10), 500);
    length += 10;
    expect_exact(*a, on_a, static_cast<std::int32_t>(length));
    expect_exact(*b, on_b, 100);  // what it has, it keeps
    const json devices = document("status")["devices"];
    EXPECT_EQ(devices[0]["device_health"]["worker_restarts"], 0);
    EXPECT_EQ(devices[0]["device_health"]["state"], "ok");
    back = devices[1]["device_health"]["worker_restarts"] == 1 && devices[1]["device_health"]["state"] == "ok";
    ASSERT_LT(length, 600u) << devices;
  }
  EXPECT_EQ(worker_of(kA), worker_a);
  b->write(on_b, 100, token_stream(2, 100), 20'000);
  expect_exact(*b, on_b, 200);
}

TEST_F(Devices, BothComeBackWhateverOrderTheyAreIn) {
  HeldDaemon& daemon = start();
  const auto a = model(kA), b = model(kB);
  Sequence on_a = a->model().open({}), on_b = b->model().open({});
  std::uint32_t length = 0;
  const auto write = [&](std::uint32_t tokens) {
    a->write(on_a, length, token_stream(length + 1, tokens), 20'000);
    b->write(on_b, length, token_stream(length + 2, tokens), 20'000);
    length += tokens;
  };
  write(100);
  const std::uint32_t number_a = session_on(kA), number_b = session_on(kB);
  const std::uint32_t held = daemon.descriptors_held();
  for (std::uint32_t life = 2; life < 4; ++life) {
    show(life == 2 ? std::vector<std::string>{kB, kA} : std::vector<std::string>{kA, kB});
    daemon.kill();
    daemon.await_lives(life);
    await_back(a->get(), life - 1);
    await_back(b->get(), life - 1);
    write(50);
    expect_exact(*a, on_a, static_cast<std::int32_t>(length));
    expect_exact(*b, on_b, static_cast<std::int32_t>(length));
    EXPECT_EQ(session_on(kA), number_a);
    EXPECT_EQ(session_on(kB), number_b);
    const json devices = document("status")["devices"];
    EXPECT_EQ(devices[0]["name"], life == 2 ? kB : kA);
    for (const json& device : devices) EXPECT_EQ(device["adopt"]["sessions"], 1) << daemon.log();
  }
  EXPECT_EQ(daemon.descriptors_held(), held);
  const auto more = model(kB);
  EXPECT_EQ(document("status")["sessions"], 3);
}

TEST_F(Devices, WhatWasOnOneThatIsGoneEndsAndTheOtherGoesOn) {
  HeldDaemon& daemon = start();
  auto a = model(kA);
  const auto b = model(kB);
  Sequence on_b = b->model().open({});
  {
    Sequence on_a = a->model().open({});
    a->write(on_a, 0, token_stream(1, 100));
    b->write(on_b, 0, token_stream(1, 100));
    show({kB});
    daemon.kill();
    daemon.await_lives(2);
    await_back(b->get(), 1);
    b->write(on_b, 100, token_stream(2, 100), 20'000);
    expect_exact(*b, on_b, 200);
    EXPECT_EQ(status_once_lost(*a), KVQ_ERR_DAEMON_GONE);
    EXPECT_NE(std::strstr(kvq_last_error(), "close the model and register again"), nullptr) << kvq_last_error();
  }
  a.reset();
  EXPECT_NE(daemon.log().find("event=device_gone"), std::string::npos) << daemon.log();
  const json status = document("status");
  EXPECT_FALSE(status.contains("devices")) << "one device: the document of one";
  EXPECT_EQ(status["device_health"]["uuid"], kB);
  EXPECT_EQ(status["sessions"], 1);
  // It is back, and new: numbers of its sessions collide with none.
  show({kA, kB});
  daemon.kill();
  daemon.await_lives(3);
  await_back(b->get(), 2);
  a = model(kA);
  expect_exact(*b, on_b, 200);
  EXPECT_NE(session_on(kA), session_on(kB));
}

// The loss of a legacy GPU's pages ends kvqd; the next one takes over what was on the others.
TEST_F(Devices, WhatEndsWithTheWorkerOfALegacyOneIsNothingToTheOthers) {
  show({std::string(kA) + " no_vmm=1", kB});
  HeldDaemon& daemon = start();
  auto a = model(kA);
  const auto b = model(kB);
  Sequence on_b = b->model().open({});
  b->write(on_b, 0, token_stream(1, 100));
  {
    Sequence on_a = a->model().open({});
    a->write(on_a, 0, token_stream(1, 100));
    json devices = document("status")["devices"];
    EXPECT_EQ(devices[0]["device_health"]["export"], "legacy");
    EXPECT_EQ(devices[1]["device_health"]["export"], "vmm");
    ::kill(worker_of(kA), SIGKILL);
    daemon.await_lives(2);
    await_back(b->get(), 1);
    EXPECT_EQ(status_once_lost(*a), KVQ_ERR_DAEMON_GONE);
    devices = document("status")["devices"];
    EXPECT_NE(devices[0]["adopt"]["refused"], "");
    EXPECT_EQ(devices[1]["adopt"]["refused"], "");
    EXPECT_EQ(devices[1]["adopt"]["sessions"], 1);
  }
  expect_exact(*b, on_b, 100);
  b->write(on_b, 100, token_stream(2, 100), 20'000);
  expect_exact(*b, on_b, 200);
  a.reset();
  a = model(kA);  // its GPU serves again, clean
  Sequence again = a->model().open({});
  a->write(again, 0, token_stream(1, 100), 20'000);
  expect_exact(*a, again, 100);
}

TEST_F(Devices, OneThatCannotStartLeavesTheOthersServingAndIsSaid) {
  show({kA, std::string(kB) + " no_gpu=it_is_broken"});
  HeldDaemon& daemon = start();
  const json status = document("status");
  EXPECT_EQ(status["device_health"]["uuid"], kA);
  ASSERT_EQ(status["not_served"].size(), 1u) << status;
  EXPECT_EQ(status["not_served"][0]["uuid"], kB);
  EXPECT_NE(status["not_served"][0]["text"].get<std::string>().find("it_is_broken"), std::string::npos) << status;
  EXPECT_NE(ctl("status").find("DEGRADED"), std::string::npos);
  const auto any = model(nullptr);  // the one that there is
  EXPECT_EQ(session_on(kA), 1u);
  EXPECT_NE(daemon.log().find("event=device_not_served"), std::string::npos);
}

TEST_F(Devices, OneThatIsNamedAndCannotStartIsAReasonNotTo) {
  show({kA, std::string(kB) + " no_gpu=it_is_broken"});
  try {
    start("[\"" + std::string(kA) + "\", \"" + kB + "\"]");
    FAIL() << "it serves";
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("device = " + std::string(kB)), std::string::npos) << text;
    EXPECT_NE(text.find("it_is_broken"), std::string::npos) << text;
  }
}

TEST_F(Devices, NamedOnesAreServedAndAutoTakesTheHostWhenThereIsNone) {
  start("\"" + std::string(kB) + "\"");
  EXPECT_EQ(document("status")["device_health"]["uuid"], kB);
  daemon_.reset();
  show({});
  start("\"auto\"");
  EXPECT_EQ(document("status")["device"], "host");
  EXPECT_EQ(document("status")["device_health"]["uuid"], "");
  EXPECT_NE(daemon_->log().find("event=device device=host why="), std::string::npos) << daemon_->log();
}

TEST_F(Devices, AModelThatNamesNoneIsToldWhichThereAreAndAllCountForTheLimits) {
  start("\"cuda\"", "max_sessions = 2\n");
  const auto refused = [&](const char* device, kvq_role role) {
    try {
      model(device, role);
    } catch (const Failure& error) {
      return std::pair(error.status(), std::string(error.what()));
    }
    return std::pair(KVQ_OK, std::string());
  };
  const auto [status, text] = refused(nullptr, KVQ_ROLE_CONTROL);
  EXPECT_EQ(status, KVQ_ERR_INVALID_ARGUMENT);
  for (const char* part : {kA, kB, "name one"}) EXPECT_NE(text.find(part), std::string::npos) << text;
  // Without CUDA or a driver there is nothing to choose from; with one, its GPUs are others than these.
  const auto chosen = refused(nullptr, KVQ_ROLE_BOTH);
  EXPECT_TRUE(chosen.first == KVQ_ERR_SYSTEM || chosen.first == KVQ_ERR_INVALID_ARGUMENT) << chosen.second;
  EXPECT_NE(chosen.second.find("kvqd serves"), std::string::npos) << chosen.second;
  const auto a = model(kA), b = model(kB);
  EXPECT_EQ(refused(kA, KVQ_ROLE_BOTH).first, KVQ_ERR_LIMIT_REACHED);
}

TEST_F(Devices, AreResizedTogetherOrOneAlone) {
  start();
  const json both = document("resize 8MiB");
  ASSERT_EQ(both["devices"].size(), 2u) << both.dump();
  for (const json& device : both["devices"]) EXPECT_EQ(device["arena_bytes_before"], 4 << 20);
  EXPECT_EQ(document(std::string("resize 2MiB --device ") + kB)["device"], kB);
  const auto arena = [this](int device) { return document("status")["devices"][device]["arena"]; };
  EXPECT_EQ(arena(0)["bytes"], 8 << 20);
  EXPECT_EQ(arena(1)["bytes"], 2 << 20);
  int exit_code = 0;
  EXPECT_NE(ctl("resize 1TiB", &exit_code).find(kA), std::string::npos);
  EXPECT_EQ(exit_code, 1);
  EXPECT_EQ(arena(0)["bytes"], 8 << 20);
  daemon_->kill();
  daemon_->await_lives(2);
  EXPECT_EQ(arena(0)["bytes"], 8 << 20);
  EXPECT_EQ(arena(1)["bytes"], 2 << 20) << "each keeps its own";
}

}  // namespace
}  // namespace kvq::test

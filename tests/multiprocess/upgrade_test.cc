// Another version takes over: up and down within one state version everything goes on; what cannot be read is refused
// whole, with the reason.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "daemon/core/page_table.h"
#include "daemon/shm/table_file.h"
#include "daemon/store_records.h"
#include "kvq/directory.h"
#include "tests/multiprocess/decoder.h"
#include "tests/support/daemon_process.h"
#include "tests/support/held_daemon.h"
#include "tests/support/raw_session.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using nlohmann::json;

// Quantizes most of the time, so that both formats are moved across.
std::string busy_settings() {
  return "arena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\n"
         "quantize_at = 0.1\nevict_at = 0.8\nrefuse_at = 0.95\nrelief = 0.02\nresidual_window_pages = 1\n";
}

json status_of(const HeldDaemon& daemon) { return json::parse(RawSession(daemon.socket()).status()); }

// A file that the holder keeps, by its name, read and written through the holder's own descriptor.
class KeptFile {
 public:
  KeptFile(pid_t holder, const std::string& memory_file) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(holder) + "/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (target != "/memfd:" + memory_file + " (deleted)") continue;
      fd_ = ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
      return;
    }
  }
  ~KeptFile() { ::close(fd_); }
  KeptFile(const KeptFile&) = delete;
  KeptFile& operator=(const KeptFile&) = delete;
  bool found() const { return fd_ >= 0; }
  template <typename T>
  void write(std::uint64_t at, const T& value) {
    ASSERT_EQ(::pwrite(fd_, &value, sizeof(value), static_cast<off_t>(at)), static_cast<ssize_t>(sizeof(value)));
  }
  template <typename T>
  T read(std::uint64_t at) const {
    T value{};
    EXPECT_EQ(::pread(fd_, &value, sizeof(value), static_cast<off_t>(at)), static_cast<ssize_t>(sizeof(value)));
    return value;
  }

 private:
  int fd_ = -1;
};

std::string writer_of(const HeldDaemon& daemon) {
  const KeptFile root(daemon.holder(), "kvq-root");
  EXPECT_TRUE(root.found());
  return root.read<RootRecord>(sizeof(TableHeader)).writer;
}

// Sealed pages of the first tenant, and how many of them have a checksum.
std::pair<int, int> sealed_and_summed(const HeldDaemon& daemon) {
  const KeptFile file(daemon.holder(), "kvq-pages");
  EXPECT_TRUE(file.found());
  std::pair<int, int> out{0, 0};
  for (std::uint64_t i = 0; i < 1024; ++i) {
    const auto r = file.read<PageRecord>(sizeof(TableHeader) + i * sizeof(PageRecord));
    if (r.state != PageState::sealed && r.state != PageState::transcoding) continue;  // or being read for its sum
    ++out.first;
    out.second += (r.flags & kPageHasChecksum) != 0 ? 1 : 0;
  }
  return out;
}

void expect_taken_over(const HeldDaemon& daemon, std::uint32_t lives, const char* version) {
  const json status = status_of(daemon);
  EXPECT_EQ(status["version"], version);
  EXPECT_EQ(status["adopt"]["adopted"], true) << status["adopt"] << daemon.log();
  EXPECT_EQ(status["adopt"]["refused"], "");
  EXPECT_GE(status["adopt"]["sessions"], 2) << "life " << lives;
}

// From one program to the other and on, `rounds` times by each way, while two clients decode.
void replace_under_load(const char* first, const char* first_version, const char* second, const char* second_version) {
  HeldDaemon daemon(busy_settings(), {}, first);
  DecoderProcess one(daemon.socket(), 1), two(daemon.socket(), 2);
  const std::uint32_t sessions[] = {one.report().session, two.report().session};
  const std::string instance = status_of(daemon)["instance"].dump();
  EXPECT_EQ(status_of(daemon)["version"], first_version);
  EXPECT_EQ(writer_of(daemon), first_version);
  std::uint32_t lives = 1;
  std::uint64_t quantized = 0;
  for (const bool killed : {false, true}) {
    for (const auto& [program, version] : {std::pair{second, second_version}, std::pair{first, first_version}}) {
      one.decode_for(300);
      daemon.replace_program(program);
      killed ? daemon.kill() : daemon.upgrade();
      daemon.await_lives(++lives);
      one.decode_for(300);
      expect_taken_over(daemon, lives, version);
      const DecoderReport a = one.report(), b = two.report();
      std::printf("to %s by %s: %s\n          %s\n", version, killed ? "SIGKILL" : "SIGHUP", a.text().c_str(),
                  b.text().c_str());
      EXPECT_GT(a.turns + b.turns, 0u);
      quantized += a.quantized_calls + b.quantized_calls;
      EXPECT_LE(std::max(a.turn_max_ms, b.turn_max_ms), 20'000);
    }
  }
  const DecoderReport a = one.report(), b = two.report();
  EXPECT_EQ(a.session, sessions[0]);
  EXPECT_EQ(b.session, sessions[1]);
  EXPECT_GT(quantized, 0u) << "pages of both formats must be taken over";
  EXPECT_EQ(a.reconnects, 4u);
  EXPECT_EQ(b.reconnects, 4u);
  EXPECT_EQ(status_of(daemon)["instance"].dump(), instance);
  EXPECT_EQ(one.end(), 0) << "it read something wrong";
  EXPECT_EQ(two.end(), 0) << "it read something wrong";
}

TEST(Upgrade, OlderKvqdIsReplacedUnderLoadAndBackAgain) {
  replace_under_load(KVQD_OLDER_PATH, "0.0.9", KVQD_PATH, KVQ_PROJECT_VERSION);
}

TEST(Upgrade, PagesOfAnOlderKvqdGetTheirChecksums) {
  HeldDaemon daemon(calm_settings(), {}, KVQD_OLDER_PATH);
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 320);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  tiny.await_cached(tokens, 320);
  EXPECT_EQ(sealed_and_summed(daemon), std::pair(5, 0));
  daemon.replace_program(KVQD_PATH);
  daemon.upgrade();
  daemon.await_lives(2);
  tiny.await("for checksums", [&] { return sealed_and_summed(daemon) == std::pair(5, 5); });
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 320, 0, test_seed()).exact, 1u);
  EXPECT_EQ(tiny.model().pressure().lost_pages, 0u);
}

// What the holder keeps is changed while no kvqd runs; the next one must refuse or take it.
void change_between(HeldDaemon& daemon, const std::string& file, std::uint64_t at, const auto& value) {
  ASSERT_EQ(::kill(daemon.holder(), SIGSTOP), 0);  // starts nothing meanwhile
  siginfo_t stopped{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(daemon.holder()), &stopped, WSTOPPED | WNOWAIT), 0);
  const pid_t last = daemon.pid();
  daemon.kill();
  const std::string stat = "/proc/" + std::to_string(last) + "/status";
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  for (std::string text; text.find("State:\tZ") == std::string::npos;) {
    ASSERT_LT(std::chrono::steady_clock::now(), until);
    std::ifstream in(stat);
    text.assign(std::istreambuf_iterator<char>(in), {});
  }
  {
    KeptFile kept(daemon.holder(), file);
    EXPECT_TRUE(kept.found()) << file;
    kept.write(at, value);
  }
  ::kill(daemon.holder(), SIGCONT);
  daemon.await_lives(2);
}

void expect_refused(const std::string& file, std::uint64_t at, std::uint32_t value, const std::string& reason) {
  HeldDaemon daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 100);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  change_between(daemon, file, at, value);
  const json adopt = status_of(daemon)["adopt"];
  EXPECT_EQ(adopt["adopted"], false);
  EXPECT_NE(adopt["refused"].get<std::string>().find(reason), std::string::npos) << adopt;
  EXPECT_NE(daemon.log().find("event=adopt_refused why=\"" + adopt["refused"].get<std::string>()), std::string::npos);
  EXPECT_EQ(kvq_reserve(sequence.get(), 1000, 60'000), KVQ_ERR_DAEMON_GONE) << kvq_last_error();
  TinyModel anew(daemon.socket(), {});
  Sequence again = anew.model().open({});
  anew.write(again, 0, tokens);
  EXPECT_EQ(anew.attend_and_check(again.block_table(), 100, 0, test_seed()).exact, 1u);
}

TEST(Upgrade, StateOfAnotherStateVersionIsRefused) {
  expect_refused("kvq-root", offsetof(TableHeader, version), kStateVersion + 1, "state version");
}

TEST(Upgrade, OneTableOfAnotherStateVersionRefusesAll) {
  expect_refused("kvq-pages", offsetof(TableHeader, version), kStateVersion + 1, "kvq-pages-1: ");
}

TEST(Upgrade, SharedMemoryOfAnotherContractVersionIsRefused) {
  expect_refused("kvq-directory", offsetof(DirectoryHeader, version), kContractVersion + 1, "kvq-directory-1: ");
}

TEST(Upgrade, NewerWriterWithinOneStateVersionIsTakenOver) {
  HeldDaemon daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 100));
  char newer[sizeof(RootRecord::writer)] = "9.9.9";
  change_between(daemon, "kvq-root", sizeof(TableHeader) + offsetof(RootRecord, writer), newer);
  EXPECT_EQ(status_of(daemon)["adopt"]["adopted"], true) << daemon.log();
  tiny.write(sequence, 100, token_stream(2, 100));
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 200, 0, test_seed()).exact, 1u);
}

}  // namespace
}  // namespace kvq::test

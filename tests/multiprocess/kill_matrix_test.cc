// The kill matrix: at every named point of the protocol, once the daemon dies and once a client does. At a point of its
// own a process dies at once; at one of the other's it dies while the other stands still there.
//
// Invariant: whoever died, every page's bytes are what its tokens say, sessions that live go on and end well, a new
// client is served, and in the end nothing is charged, kept or open any more.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "kvq/kill_point.h"
#include "tests/multiprocess/matrix.h"
#include "tests/support/accounts.h"
#include "tests/support/held_daemon.h"
#include "tests/support/page_bytes.h"
#include "tests/support/role_process.h"

namespace kvq::test {
namespace {

constexpr std::uint32_t kPatienceMs = 30'000;

// Small marks and a small arena: the worker's pages are quantized, moved and dropped, slabs come and go.
std::string tight_settings() {
  return "arena_bytes = \"4MiB\"\nslab_bytes = \"256KiB\"\nmax_pages = 1024\nlog_level = \"debug\"\n"
         "quantize_at = 0.2\nevict_at = 0.3\nrefuse_at = 0.97\nrelief = 0.05\nresidual_window_pages = 1\n"
         "[[tenants]]\nname = \"mine\"\nuids = [0]\n";
}

bool of_client(KillPoint point) { return std::string(name(point)).rfind("client_", 0) == 0; }

// Points that are passed all the time are met at different times; the others at the first.
std::uint64_t times(KillPoint point) {
  const bool often = point <= KillPoint::seal_committed ||
                     (point >= KillPoint::transcode_started && point <= KillPoint::page_dropped) ||
                     (point >= KillPoint::client_credit_popped && point <= KillPoint::client_step_ended);
  return often ? 1 + (test_seed() >> static_cast<unsigned>(point) % 32) % 5 : 1;
}

bool stands_still(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  std::string text;
  std::getline(file, text);
  const auto end = text.rfind(") ");
  return end != std::string::npos && text[end + 2] == 'T';
}

// What has been learnt of a stream is in no process but the worker's: whoever asks finds its bytes, or nothing.
void check_cache(TinyModel& tiny) {
  for (std::uint32_t stream = 0; stream < kMatrixStreams; ++stream) {
    const auto tokens = matrix_tokens(stream);
    std::uint64_t cached = 0;
    Sequence sequence = tiny.model().open(tokens, &cached);
    check_pages(tiny, sequence.block_table(), {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(cached)});
  }
}

class Scene {
 public:
  Scene()
      : daemon(tight_settings()),
        books(daemon, 1),
        survivor(std::make_unique<TinyModel>(daemon.socket(), ModelOptions{})) {
    kept = survivor->model().open({});
    survivor->write(kept, 0, tokens, kPatienceMs);
  }

  // After whatever has happened: the survivor goes on, a new client is served, and then nothing is left of anybody.
  void end() {
    check_pages(*survivor, kept.block_table(), tokens);
    survivor->attend_and_check(kept.block_table(), static_cast<std::int32_t>(tokens.size()), 0, test_seed());
    const auto more = token_stream(3, 100);
    survivor->write(kept, tokens.size(), more, kPatienceMs);
    tokens.insert(tokens.end(), more.begin(), more.end());
    check_pages(*survivor, kept.block_table(), tokens);
    {
      TinyModel fresh(daemon.socket(), {});
      check_cache(fresh);
      Sequence anew = fresh.model().open({});
      fresh.write(anew, 0, token_stream(4, 200), kPatienceMs);
      check_pages(fresh, anew.block_table(), token_stream(4, 200));
    }
    kept = Sequence();
    survivor.reset();
    EXPECT_EQ(books.close(), "");
    const std::string log = daemon.log();
    EXPECT_EQ(log.find("adopt_refused"), std::string::npos);
    EXPECT_EQ(log.find("session_incomplete"), std::string::npos);
    if (::testing::Test::HasFailure()) std::fprintf(stderr, "%s\n", log.c_str());
  }

  HeldDaemon daemon;
  Books books;
  std::unique_ptr<TinyModel> survivor;
  std::vector<std::uint32_t> tokens = token_stream(1, 300);
  Sequence kept;
};

void let_finish(RoleProcess& worker) {
  ASSERT_EQ(worker.hear().substr(0, 5), "done ");
  worker.say("end");
  EXPECT_EQ(worker.wait(), 0);
}

void worker_dies_by_itself(RoleProcess& worker) {
  try {
    FAIL() << "the worker never came to the point: " << worker.hear();
  } catch (const std::runtime_error& ended) {
    ASSERT_STREQ(ended.what(), "the role ended");
    EXPECT_EQ(worker.wait(), -SIGKILL);
  }
}

void kill_worker_where_the_daemon_stands(Scene& scene, RoleProcess& worker) {
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);;) {
    if (scene.daemon.plan_is_done() && stands_still(scene.daemon.pid())) break;
    ASSERT_LT(std::chrono::steady_clock::now(), until) << "kvqd did not come to the point";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // a process that stops tells its parent only
  }
  EXPECT_EQ(worker.kill(), -SIGKILL) << "the worker ended by itself";
  ::kill(scene.daemon.pid(), SIGCONT);
}

void kill_daemon_where_the_worker_stands(Scene& scene, RoleProcess& worker) {
  siginfo_t info{};
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60); info.si_pid == 0;) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << "the worker did not come to the point";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(worker.pid()), &info, WSTOPPED | WEXITED | WNOHANG | WNOWAIT), 0);
  }
  ASSERT_EQ(info.si_code, CLD_STOPPED) << "the worker ended by itself";
  scene.daemon.await_lives(2);
  scene.daemon.kill();
  scene.daemon.await_lives(3);
  ::kill(worker.pid(), SIGCONT);
  let_finish(worker);
}

struct Death {
  KillPoint point;
  bool of_daemon;
};

class KillMatrix : public ::testing::TestWithParam<Death> {};

TEST_P(KillMatrix, LeavesEveryByteAndNoDebt) {
  const auto [point, of_daemon] = GetParam();
  const std::string count = std::to_string(times(point)), at = of_client(point) ? name(point) : "-";
  Scene scene;
  RoleProcess worker("matrix_worker", {scene.daemon.socket(), at, count, of_daemon ? "stop" : "kill"});
  ASSERT_EQ(worker.hear(), "ready");
  if (!of_client(point)) scene.daemon.plan(name(point), times(point), of_daemon ? "kill" : "stop");
  scene.daemon.kill();  // in any case once: its plan is read by the next, and the client's come back to that one
  worker.say("go");
  if (of_client(point) && of_daemon) {
    kill_daemon_where_the_worker_stands(scene, worker);
  } else if (of_client(point)) {
    worker_dies_by_itself(worker);
  } else if (of_daemon) {
    let_finish(worker);
    EXPECT_TRUE(scene.daemon.plan_is_done()) << "kvqd never came to the point";
  } else {
    kill_worker_where_the_daemon_stands(scene, worker);
  }
  if (!HasFatalFailure()) scene.end();
}

std::vector<Death> all_deaths() {
  std::vector<Death> out;
  for (std::size_t i = 0; i < kKillPoints; ++i) {
    for (const bool of_daemon : {true, false}) out.push_back({static_cast<KillPoint>(i), of_daemon});
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(All, KillMatrix, ::testing::ValuesIn(all_deaths()), [](const auto& info) {
  return std::string(info.param.of_daemon ? "daemon_at_" : "client_at_") + name(info.param.point);
});

// Dies with sequences and inside a step.
KVQ_ROLE(dies_in_a_step) {
  TinyModel tiny(arguments[0], {});
  Sequence one = tiny.model().open({});
  tiny.write(one, 0, token_stream(5, 200), kPatienceMs);
  Sequence two = one.fork(kPatienceMs);
  const Step step(tiny.model());
  say("stepping");
  hear();
  return 0;
}

TEST(KillMatrixPoints, StepsOfADeadProcessEndAlsoWhenTheDaemonDiesWhileItEndsTheSession) {
  for (const char* point : {"sequence_ended", "session_ended"}) {
    Scene scene;
    RoleProcess dies("dies_in_a_step", {scene.daemon.socket()});
    ASSERT_EQ(dies.hear(), "stepping");
    scene.daemon.plan(point);
    scene.daemon.kill();
    scene.daemon.await_lives(2);
    EXPECT_EQ(dies.kill(), -SIGKILL);
    scene.daemon.await_lives(3);
    EXPECT_TRUE(scene.daemon.plan_is_done());
    scene.end();
  }
}

TEST(KillMatrixPoints, EachIsReached) {
  Scene scene;
  RoleProcess worker("matrix_worker", {scene.daemon.socket(), "-", "1", "kill"});
  ASSERT_EQ(worker.hear(), "ready");
  scene.daemon.kill();
  worker.say("go");
  std::istringstream line(worker.hear());
  std::set<std::string> reached = scene.daemon.reached();
  for (std::string word; line >> word;) reached.insert(word);
  ASSERT_EQ(reached.count("done"), 1u);
  worker.say("end");
  EXPECT_EQ(worker.wait(), 0);
  for (std::size_t i = 0; i < kKillPoints; ++i) {
    const char* point = name(static_cast<KillPoint>(i));
    EXPECT_EQ(reached.count(point), 1u) << point << " was never reached";
  }
  scene.end();
}

}  // namespace
}  // namespace kvq::test

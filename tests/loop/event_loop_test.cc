// The loop against real descriptors, signals and processes; the four rules of event_loop.cc each have a test that
// hangs or spins without them. No test sleeps: each waits for the loop itself.
#include "daemon/event_loop.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <kj/async-io.h>
#include <kj/debug.h>
#include <kj/timer.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace kvq {
namespace {

class EventLoopTest : public ::testing::Test {
 public:
  ~EventLoopTest() noexcept override = default;  // KJ's own destructors may throw; here that ends the test program

 protected:
  void pass_ms(int ms) { loop->run(io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS)); }

  // Runs until `done`, at most ten seconds.
  void run_until(std::function<bool()> done) {
    auto pair = kj::newPromiseAndFulfiller<void>();
    auto limit =
        io.provider->getTimer().afterDelay(10 * kj::SECONDS).then([] { KJ_FAIL_REQUIRE("ten seconds passed"); });
    auto watch = loop->every(1, [&] {
      if (done()) pair.fulfiller->fulfill();
    });
    loop->run(pair.promise.exclusiveJoin(kj::mv(limit)));
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  std::unique_ptr<EventLoop> loop = std::make_unique<EventLoop>(io);
};

int new_eventfd() { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }

void add(int fd) {
  const std::uint64_t one = 1;
  ASSERT_EQ(write(fd, &one, sizeof one), static_cast<ssize_t>(sizeof one));
}

std::uint64_t drain(int fd) {
  std::uint64_t value = 0;
  return read(fd, &value, sizeof value) == sizeof value ? value : 0;
}

TEST_F(EventLoopTest, TimerRepeatsAtItsInterval) {
  int calls = 0;
  const auto start_ms = loop->now_ms();
  auto watch = loop->every(5, [&] { ++calls; });
  run_until([&] { return calls >= 10; });
  EXPECT_GE(loop->now_ms() - start_ms, 45u);  // ten intervals of 5 ms, libuv's clock being coarse by one tick
}

TEST_F(EventLoopTest, TimerStartedFromKjHandlerFires) {
  // Rule 3: libuv is asleep when the handler adds the timer.
  std::optional<EventLoop::Watch> watch;
  auto pair = kj::newPromiseAndFulfiller<void>();
  auto later = io.provider->getTimer().afterDelay(20 * kj::MILLISECONDS).then([&] {
    watch = loop->every(1, [&] { pair.fulfiller->fulfill(); });
  });
  auto task = later.eagerlyEvaluate(nullptr);
  loop->run(kj::mv(pair.promise));
}

TEST_F(EventLoopTest, TimerStartedAfterLongSleepWaitsItsWholeInterval) {
  pass_ms(80);
  const auto start_ms = loop->now_ms();
  auto pair = kj::newPromiseAndFulfiller<void>();
  auto watch = loop->every(50, [&] { pair.fulfiller->fulfill(); });
  loop->run(kj::mv(pair.promise));
  EXPECT_GE(loop->now_ms() - start_ms, 45u);
}

TEST_F(EventLoopTest, IdleLoopTakesNoTurn) {
  const auto turns_while_idle = [&] {
    pass_ms(20);  // what setting up costs
    const auto before = loop->turns();
    pass_ms(200);
    return loop->turns() - before;
  };
  EXPECT_EQ(turns_while_idle(), 0u);  // rule 1: nothing is watched at all
  const int fd = new_eventfd();
  auto watch = loop->on_readable(fd, [] {});
  EXPECT_EQ(turns_while_idle(), 0u);
  watch.cancel();
  close(fd);
}

TEST_F(EventLoopTest, TimerCostsAboutOneTurnPerCall) {
  int calls = 0;
  auto watch = loop->every(10, [&] { ++calls; });
  const auto before = loop->turns();
  pass_ms(400);
  ASSERT_GE(calls, 3);
  EXPECT_LE(loop->turns() - before, 2u * calls + 3);
}

TEST_F(EventLoopTest, BlockingWorkRunsElsewhereAndCompletesOnLoopThread) {
  const auto loop_thread = std::this_thread::get_id();
  std::thread::id work_thread, completion_thread;
  loop->run(loop->submit_blocking([&] { work_thread = std::this_thread::get_id(); }).then([&] {
    completion_thread = std::this_thread::get_id();
  }));
  EXPECT_NE(work_thread, loop_thread);
  EXPECT_NE(work_thread, std::thread::id());
  EXPECT_EQ(completion_thread, loop_thread);
}

TEST_F(EventLoopTest, LoopServesTimersWhileWorkBlocks) {
  int gate[2];
  ASSERT_EQ(pipe2(gate, O_CLOEXEC), 0);
  auto work = loop->submit_blocking([&] {
    char byte;
    KJ_ASSERT(read(gate[0], &byte, 1) == 1);
  });
  int calls = 0;
  auto watch = loop->every(1, [&] { ++calls; });
  run_until([&] { return calls >= 5; });
  ASSERT_EQ(write(gate[1], "x", 1), 1);
  loop->run(kj::mv(work));
}

TEST_F(EventLoopTest, ThrowingWorkRejectsItsPromiseOnly) {
  auto work = loop->submit_blocking([] { throw std::runtime_error("disk on fire"); });
  std::string message;
  loop->run(work.catch_([&](kj::Exception&& e) { message = e.getDescription().cStr(); }));
  EXPECT_NE(message.find("disk on fire"), std::string::npos) << message;
  loop->run(loop->submit_blocking([] {}));
}

TEST_F(EventLoopTest, ManyWorkItemsAllComplete) {
  std::atomic<int> ran = 0;
  auto all = kj::heapArrayBuilder<kj::Promise<void>>(500);
  for (int i = 0; i < 500; ++i) all.add(loop->submit_blocking([&] { ran.fetch_add(1); }));
  loop->run(kj::joinPromises(all.finish()));
  EXPECT_EQ(ran.load(), 500);
}

TEST_F(EventLoopTest, DestroyedLoopFinishesSubmittedWork) {
  std::atomic<int> ran = 0;
  for (int i = 0; i < 20; ++i) {
    auto dropped = loop->submit_blocking([&] { ran.fetch_add(1); });
  }
  loop.reset();
  EXPECT_EQ(ran.load(), 20);
}

TEST_F(EventLoopTest, EventfdWrittenByAnotherThreadWakesTheLoop) {
  const int fd = new_eventfd();
  std::uint64_t sum = 0;
  auto watch = loop->on_readable(fd, [&] { sum += drain(fd); });
  pass_ms(10);  // the loop has slept once
  std::thread writer([&] {
    for (int i = 0; i < 1000; ++i) add(fd);
  });
  run_until([&] { return sum == 1000; });
  writer.join();
  close(fd);
}

TEST_F(EventLoopTest, UnreadDescriptorIsReportedAgainAndStarvesNobody) {
  // Level-triggered: a body that does not read is called again, and KJ's own timer still gets its turn (else this
  // hangs).
  const int fd = new_eventfd();
  int calls = 0;
  auto watch = loop->on_readable(fd, [&] { ++calls; });
  add(fd);
  pass_ms(20);
  EXPECT_GT(calls, 10);
  drain(fd);
  pass_ms(5);
  const int after_drain = calls;
  pass_ms(20);
  EXPECT_EQ(calls, after_drain);
  close(fd);
}

TEST_F(EventLoopTest, ManyDescriptorsWakeEachTheirOwnBody) {
  constexpr int kFds = 400;
  std::vector<int> fds, hits(kFds, 0);
  std::vector<EventLoop::Watch> watches;
  int total = 0;
  for (int i = 0; i < kFds; ++i) {
    fds.push_back(new_eventfd());
    ASSERT_GE(fds.back(), 0);
    watches.push_back(loop->on_readable(fds[i], [&, i] {
      drain(fds[i]);
      ++hits[i];
      ++total;
    }));
  }
  for (int fd : fds) add(fd);
  run_until([&] { return total == kFds; });
  for (int i = 0; i < kFds; ++i) EXPECT_EQ(hits[i], 1) << i;
  watches.clear();
  for (int fd : fds) close(fd);
}

TEST_F(EventLoopTest, DescriptorMayBeClosedRightAfterItsWatch) {
  // The number is reused at once; the old watch must not see the new descriptor.
  int old_calls = 0, new_calls = 0;
  const int fd = new_eventfd();
  auto old_watch = loop->on_readable(fd, [&] { ++old_calls; });
  pass_ms(5);
  old_watch.cancel();
  close(fd);
  const int reused = new_eventfd();
  ASSERT_EQ(reused, fd);
  auto new_watch = loop->on_readable(reused, [&] {
    drain(reused);
    ++new_calls;
  });
  add(reused);
  run_until([&] { return new_calls == 1; });
  EXPECT_EQ(old_calls, 0);
  close(reused);
}

TEST_F(EventLoopTest, PidfdBecomesReadableWhenProcessDies) {
  int gate[2];
  ASSERT_EQ(pipe2(gate, O_CLOEXEC), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(gate[1]);
    char byte;
    _exit(read(gate[0], &byte, 1) == 0 ? 0 : 1);  // ends when the parent closes or kills
  }
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, child, 0));
  ASSERT_GE(pidfd, 0);
  bool dead = false;
  EventLoop::Watch watch;
  watch = loop->on_readable(pidfd, [&] {
    dead = true;
    watch.cancel();
  });
  pass_ms(20);
  EXPECT_FALSE(dead);
  kill(child, SIGKILL);
  run_until([&] { return dead; });
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  close(pidfd);
  close(gate[0]);
  close(gate[1]);
}

TEST_F(EventLoopTest, WatchDestroyedInsideItsOwnCallbackIsNotCalledAgain) {
  int calls = 0;
  std::optional<EventLoop::Watch> watch;
  std::string captured(100, 'x');  // on the heap: a body destroyed while it runs would be read after free
  watch = loop->every(1, [&, captured] {
    ++calls;
    watch.reset();
    EXPECT_EQ(captured.size(), 100u);
  });
  pass_ms(30);
  EXPECT_EQ(calls, 1);
}

TEST_F(EventLoopTest, CallbackMayCancelAnotherWatchThatIsDue) {
  int a = 0, b = 0;
  EventLoop::Watch first, second;
  first = loop->every(5, [&] {
    ++a;
    first.cancel();
    second.cancel();
  });
  second = loop->every(5, [&] {
    ++b;
    first.cancel();
    second.cancel();
  });
  pass_ms(40);
  EXPECT_EQ(a + b, 1);
}

TEST_F(EventLoopTest, CallbackMayAddWatches) {
  const int fd = new_eventfd();
  add(fd);
  bool seen = false;
  EventLoop::Watch timer, reader;
  timer = loop->every(1, [&] {
    timer.cancel();
    reader = loop->on_readable(fd, [&] {
      drain(fd);
      seen = true;
    });
  });
  run_until([&] { return seen; });
  reader.cancel();
  close(fd);
}

TEST_F(EventLoopTest, WatchMayOutliveTheLoop) {
  auto timer = loop->every(1000, [] {});
  const int fd = new_eventfd();
  auto reader = loop->on_readable(fd, [] {});
  loop.reset();
  timer.cancel();
  close(fd);
}

TEST_F(EventLoopTest, ThrowingCallbackEndsRunWithItsException) {
  auto watch = loop->every(1, [] { throw std::runtime_error("bug in a callback"); });
  try {
    loop->run(kj::NEVER_DONE);
    FAIL() << "run returned";
  } catch (const kj::Exception& e) {
    EXPECT_NE(std::string(e.getDescription().cStr()).find("bug in a callback"), std::string::npos);
  }
}

TEST_F(EventLoopTest, ThrowingCallbackDoesNotUnwindLibuv) {
  // Rule 4: both are ready in one pump; the second is served although the first throws.
  const int fds[] = {new_eventfd(), new_eventfd()};
  int calls = 0;
  const auto body = [&] {
    ++calls;
    for (int fd : fds) drain(fd);
    throw std::runtime_error("bug in a callback");
  };
  auto first = loop->on_readable(fds[0], body);
  auto second = loop->on_readable(fds[1], body);
  for (int fd : fds) add(fd);
  EXPECT_ANY_THROW(loop->run(kj::NEVER_DONE));
  EXPECT_EQ(calls, 2);
  first.cancel();
  second.cancel();
  for (int fd : fds) close(fd);
}

TEST_F(EventLoopTest, UnwatchableDescriptorIsRefused) {
  EXPECT_ANY_THROW((void)loop->on_readable(-1, [] {}));
  const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);  // epoll refuses regular files
  EXPECT_ANY_THROW((void)loop->on_readable(file, [] {}));
  close(file);
  const int fd = new_eventfd();
  auto watch = loop->on_readable(fd, [] {});
  EXPECT_ANY_THROW((void)loop->on_readable(fd, [] {}));  // one watch at a time
  watch.cancel();
  close(fd);
}

TEST_F(EventLoopTest, SigtermAndSigintResolveOnTerminate) {
  for (const int signal : {SIGTERM, SIGINT}) {
    auto promise = loop->on_terminate();
    int got = 0;
    kill(getpid(), signal);
    loop->run(promise.then([&](int value) { got = value; }));
    EXPECT_EQ(got, signal);
  }
}

TEST_F(EventLoopTest, SigtermWakesASleepingLoop) {
  auto promise = loop->on_terminate();
  pass_ms(20);
  std::thread sender([] { kill(getpid(), SIGTERM); });
  int got = 0;
  loop->run(promise.then([&](int value) { got = value; }));
  sender.join();
  EXPECT_EQ(got, SIGTERM);
}

TEST_F(EventLoopTest, PromisesThatAreNeverIdleDoNotStarveLibuv) {
  // An in-process pipe always has a runnable event, so KJ alone would never look at descriptors again.
  auto pipe = io.provider->newTwoWayPipe();
  char byte = 0;
  int trips = 0, ticks = 0;
  auto watch = loop->every(1, [&] { ++ticks; });
  std::function<kj::Promise<void>()> trip = [&]() -> kj::Promise<void> {
    if (trips >= 2000 && ticks >= 10) return kj::READY_NOW;
    return pipe.ends[0]->write("x", 1).then([&] { return pipe.ends[1]->read(&byte, 1); }).then([&] {
      ++trips;
      return trip();
    });
  };
  loop->run(trip());
  EXPECT_GE(ticks, 10);
}

}  // namespace
}  // namespace kvq

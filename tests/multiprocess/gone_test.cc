// A daemon that vanishes, and a process that forks: running work goes on, everything else waits in vain and says so
// clearly.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>

#include "tests/support/daemon_process.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

TEST(DaemonGone, CallsWaitUntilTheirDeadlineAndAttentionGoesOn) {
  DaemonProcess daemon(calm_settings());
  ModelOptions options;
  options.floor_dense = true;
  TinyModel tiny(daemon.socket(), options);
  const auto tokens = token_stream(1, 100);
  Sequence sequence = tiny.model().open({}), all = tiny.model().open({}), waiting = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  for (std::uint64_t pages = 1; kvq_reserve(all.get(), pages * KVQ_PAGE_TOKENS, 1000) == KVQ_OK;) ++pages;
  int notice = -1;
  check(kvq_notice_fd(tiny.get(), &notice));
  kvq_status blocked = KVQ_OK;
  std::string text;
  std::thread waiter([&] {
    blocked = kvq_reserve(waiting.get(), 64 * KVQ_PAGE_TOKENS, 2000);
    text = kvq_last_error();
  });
  EXPECT_EQ(kvq_credits_request(tiny.get(), 64, 100), KVQ_ERR_NO_MEMORY);  // by then the other call waits too
  for (std::uint64_t count = 0; ::read(notice, &count, sizeof(count)) > 0;) {
  }
  daemon.stop(SIGKILL);
  pollfd readable{notice, POLLIN, 0};
  EXPECT_EQ(::poll(&readable, 1, 10'000), 1);
  waiter.join();
  EXPECT_EQ(blocked, KVQ_ERR_DAEMON_GONE) << text;
  EXPECT_NE(text.find("restarting"), std::string::npos) << text;

  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 100, 0, test_seed()).exact, 1u);
  EXPECT_EQ(tiny.model().pressure().reconnecting, 1);
  EXPECT_EQ(kvq_reserve(sequence.get(), 1000, 0), KVQ_ERR_DAEMON_GONE);
  EXPECT_NE(std::strstr(kvq_last_error(), "within 0 ms"), nullptr) << kvq_last_error();
  EXPECT_EQ(kvq_commit(sequence.get(), tokens.data(), 1, 0, 0), KVQ_OK);
  EXPECT_EQ(kvq_credits_request(tiny.get(), 1, 0), KVQ_ERR_DAEMON_GONE);
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 100, 1, test_seed()).exact, 1u);
}

TEST(DaemonGone, NewDaemonLosesTheSessionAndServesANewOne) {
  DaemonProcess daemon(calm_settings());
  Client client(daemon.socket());
  const kvq_layer layer{kKvHeads, kHeadDim, KVQ_FP16, 0, kQueryHeads};
  kvq_model_desc desc{};
  desc.size = sizeof(desc);
  desc.layers = &layer;
  desc.layer_count = 1;
  desc.page_tokens = KVQ_PAGE_TOKENS;
  Model model(client, desc);
  daemon.stop(SIGKILL);
  daemon.start();
  EXPECT_EQ(kvq_credits_request(model.get(), 100, 60'000), KVQ_ERR_DAEMON_GONE);
  EXPECT_NE(std::strstr(kvq_last_error(), "kvqd started anew: close the model and register again"), nullptr)
      << kvq_last_error();
  Model again(client, desc);
  Sequence sequence = again.open({});
  sequence.reserve(64, 10'000);
  EXPECT_EQ(again.pressure().reconnecting, 0);
}

// This process's end of the connection to the daemon at `path`, found by its peer's name.
int connection_to(const std::string& path) {
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_un peer{};
    socklen_t bytes = sizeof(peer);
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &bytes) == 0 && peer.sun_family == AF_UNIX &&
        path == peer.sun_path) {
      return fd;
    }
  }
  return -1;
}

TEST(DaemonGone, CutConnectionLetsOpenStepsEndAndNoneBegin) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  std::uint64_t open = 0, next = 0;
  check(kvq_step_begin(tiny.get(), &open));
  const int connection = connection_to(daemon.socket());
  ASSERT_GE(connection, 0);
  ASSERT_EQ(::shutdown(connection, SHUT_RDWR), 0);
  kvq_status begun = KVQ_OK;
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
       begun == KVQ_OK && std::chrono::steady_clock::now() < until; std::this_thread::yield()) {
    begun = kvq_step_begin(tiny.get(), &next);
    if (begun == KVQ_OK) check(kvq_step_end(tiny.get(), next, nullptr));
  }
  EXPECT_EQ(begun, KVQ_ERR_DAEMON_GONE) << kvq_last_error();
  EXPECT_EQ(kvq_step_end(tiny.get(), open, nullptr), KVQ_OK);
}

TEST(DaemonGone, StaleSocketIsNoDaemon) {
  DaemonProcess daemon(calm_settings());
  const std::string socket = daemon.socket();
  { TinyModel tiny(socket, {}); }
  daemon.stop(SIGKILL);
  try {
    Client client(socket);
    FAIL() << "connected to a dead daemon";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status(), KVQ_ERR_NO_DAEMON) << failure.what();
  }
}

TEST(DaemonGone, SequenceOfAClosedModelIsStale) {
  DaemonProcess daemon(calm_settings());
  kvq_sequence* sequence = nullptr;
  {
    TinyModel tiny(daemon.socket(), {});
    check(kvq_sequence_open(tiny.get(), nullptr, 0, nullptr, nullptr, &sequence));
  }
  EXPECT_EQ(kvq_reserve(sequence, 1, 0), KVQ_ERR_STALE_ID);
  EXPECT_EQ(kvq_sequence_release(sequence), KVQ_OK);
}

TEST(Fork, ChildIsRefusedAndMayConnectAnew) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, token_stream(1, 64));
  const pid_t child = ::fork();
  if (child == 0) {  // no assertion may run here: the exit code says which check failed
    std::uint64_t step = 0;
    if (kvq_step_begin(tiny.get(), &step) != KVQ_ERR_FORKED) ::_exit(1);
    if (kvq_reserve(sequence.get(), 64, 0) != KVQ_ERR_FORKED) ::_exit(2);
    if (std::strstr(kvq_last_error(), "connect anew") == nullptr) ::_exit(3);
    if (kvq_model_close(tiny.get()) != KVQ_ERR_FORKED) ::_exit(4);
    try {
      TinyModel own(daemon.socket(), {});
      Sequence again = own.model().open({});
      own.write(again, 0, token_stream(2, 64));
      own.attend_and_check(again.block_table(), 64, 0, 1);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      ::_exit(5);
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(tiny.attend_and_check(sequence.block_table(), 64, 0, test_seed()).exact, 1u);
}

}  // namespace
}  // namespace kvq::test

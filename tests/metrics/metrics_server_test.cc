// The HTTP side alone, with short deadlines: who reads slowly, says nothing or comes in a crowd costs nobody else.
#include "daemon/metrics/metrics_server.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "daemon/event_loop.h"
#include "daemon/metrics_socket.h"
#include "tests/support/scrape.h"

namespace kvq {
namespace {

using test::connect_metrics;
using test::http_get;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kDeadlineMs = 300;

std::string unix_path() { return ::testing::TempDir() + "kvq_metrics_" + std::to_string(::getpid()) + ".sock"; }

// The server on a loop of its own, since the test's readers wait.
class Node {
 public:
  explicit Node(std::string text) {
    std::atomic<bool> ready = false;
    thread_ = std::thread([this, &ready, text = std::move(text)] {
      auto io = kj::setupAsyncIo();
      EventLoop loop(io);
      MetricsSocket socket({.path = unix_path(), .group = "", .host = "", .port = 0});
      auto server = serve_metrics(io, socket.fd(),
                                  {.text = [&] { return ++made, text; },
                                   .log =
                                       [&](const std::string& line) {
                                         refused += line.find("metrics_refused") == 6;
                                         cut += line.find("metrics_not_read") == 6;
                                       },
                                   .max_connections = 4,
                                   .deadline_ms = kDeadlineMs,
                                   .fresh_ms = 1000});
      auto end = kj::newPromiseAndFulfiller<void>();
      const auto watch = loop.every(5, [&] {
        if (stop_) end.fulfiller->fulfill();
      });
      ready = true;
      loop.run(kj::mv(end.promise));
    });
    while (!ready) std::this_thread::yield();
  }
  ~Node() {
    stop_ = true;
    thread_.join();
  }

  const std::string address = "unix:" + unix_path();
  std::atomic<int> made = 0, refused = 0, cut = 0;

 private:
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// Until the other end has closed it.
void read_to_end(int fd) {
  char some[1 << 16];
  while (::recv(fd, some, sizeof(some), 0) > 0) {
  }
}

void send_text(int fd, const std::string& text) {
  ASSERT_EQ(::send(fd, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
}

const std::string kGet = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";

TEST(MetricsServer, OnlyGetOfTheMetricsIsAnswered) {
  Node node("x 1\n");
  const auto reply = http_get(node.address);
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.body, "x 1\n");
  EXPECT_NE(reply.head.find("Content-Type: text/plain; version=0.0.4"), std::string::npos) << reply.head;
  EXPECT_EQ(http_get(node.address, "/metrics?x=1").status, 200);
  EXPECT_EQ(http_get(node.address, "/").status, 404);
  EXPECT_EQ(http_get(node.address, "/metrics/..").status, 404);
  for (const char* method : {"POST", "PUT", "DELETE", "HEAD"}) {
    EXPECT_EQ(http_get(node.address, "/metrics", method).status, 405) << method;
  }
  const int fd = connect_metrics(node.address);
  send_text(fd, "no HTTP at all\r\n\r\n");
  read_to_end(fd);
  ::close(fd);
  EXPECT_EQ(http_get(node.address).status, 200);
}

TEST(MetricsServer, TheTextIsMadeOnceForAllWhoAskTogether) {
  Node node("x 1\n");
  for (int i = 0; i < 50; ++i) EXPECT_EQ(http_get(node.address).status, 200);
  EXPECT_LE(node.made, 3) << "it stays fresh for a second";
}

TEST(MetricsServer, AReaderThatDoesNotReadIsCutAndOthersDoNotWait) {
  Node node(std::string(1 << 20, 'x'));
  const int fd = connect_metrics(node.address);
  send_text(fd, kGet);
  const auto start = Clock::now();
  EXPECT_EQ(http_get(node.address).body.size(), std::size_t{1} << 20);
  while (node.cut == 0 && Clock::now() - start < std::chrono::seconds(30)) std::this_thread::yield();
  EXPECT_EQ(node.cut, 1);
  EXPECT_GE(Clock::now() - start, std::chrono::milliseconds(kDeadlineMs / 2));
  read_to_end(fd);  // it is closed, so this ends
  ::close(fd);
}

TEST(MetricsServer, WhoSaysNothingHoldsAPlaceForAsLongAsTheDeadline) {
  Node node("x 1\n");
  std::vector<int> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(connect_metrics(node.address));
  send_text(silent[0], "GET /met");
  const int fifth = connect_metrics(node.address);
  read_to_end(fifth);  // turned away at once
  ::close(fifth);
  EXPECT_EQ(node.refused, 1);
  for (const int fd : silent) {
    read_to_end(fd);
    ::close(fd);
  }
  EXPECT_EQ(http_get(node.address).status, 200);
}

TEST(MetricsServer, AKeptConnectionIsAnsweredAgain) {
  Node node("x 1\n");
  const int fd = connect_metrics(node.address);
  for (int i = 0; i < 3; ++i) {
    send_text(fd, kGet);
    std::string reply;
    char some[4096];
    while (reply.find("x 1\n") == std::string::npos) {
      const ssize_t got = ::recv(fd, some, sizeof(some), 0);
      ASSERT_GT(got, 0) << reply;
      reply.append(some, static_cast<std::size_t>(got));
    }
    EXPECT_TRUE(reply.starts_with("HTTP/1.1 200")) << reply;
  }
  ::close(fd);
}

TEST(MetricsSocket, APortThatIsTakenIsSaidWithTheFix) {
  const auto port = static_cast<std::uint16_t>(std::stoul(test::free_port()));
  const MetricsSocketOptions options{.path = "", .group = "", .host = "127.0.0.1", .port = port};
  const MetricsSocket first(options);
  try {
    MetricsSocket second(options);
    FAIL() << "two have one port";
  } catch (const StartupError& error) {
    EXPECT_EQ(error.code, ExitCode::environment);
    EXPECT_NE(std::string(error.what()).find("metrics on 127.0.0.1:" + std::to_string(port)), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("choose another port"), std::string::npos) << error.what();
  }
}

TEST(MetricsSocket, AUnixSocketIsForItsGroupAndGoesAtTheEnd) {
  {
    const MetricsSocket socket({.path = unix_path(), .group = "", .host = "", .port = 0});
    EXPECT_EQ(std::filesystem::status(unix_path()).permissions() & std::filesystem::perms::others_all,
              std::filesystem::perms::none);
  }
  EXPECT_FALSE(std::filesystem::exists(unix_path()));
}

}  // namespace
}  // namespace kvq

// Real sockets and real processes in a directory of their own. Children report by exit code and pipe, never by timing.
#include "daemon/listen_socket.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <vector>

#include "daemon/intake.h"

namespace kvq {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int kAlreadyRunning = static_cast<int>(ExitCode::already_running);

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  return address;
}

bool connects(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto address = address_of(path);
  const bool ok = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  return ok;
}

int plain_listener(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto address = address_of(path);
  EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0) << std::strerror(errno);
  EXPECT_EQ(listen(fd, 4), 0);
  return fd;
}

pid_t start(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  return child;
}

int exit_code_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

class ListenSocketTest : public ::testing::Test {
 protected:
  ListenSocketTest() { std::filesystem::create_directories(directory); }
  ~ListenSocketTest() override { std::filesystem::remove_all(directory); }

  // What it throws, or nothing when it listens.
  static std::optional<StartupError> refusal(const ListenOptions& options) {
    try {
      ListenSocket socket(options);
    } catch (const StartupError& error) {
      EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
      return error;
    }
    return std::nullopt;
  }

  // A daemon in another process: returns when it listens. It ends when `gate` (its write end) is closed or it is
  // killed.
  pid_t start_daemon(int& gate) {
    int ready[2], hold[2];
    EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
    EXPECT_EQ(pipe2(hold, O_CLOEXEC), 0);
    const pid_t child = start([&] {
      close(hold[1]);
      ListenSocket socket({.path = path});
      char byte = 'r';
      if (write(ready[1], &byte, 1) != 1) return 1;
      return read(hold[0], &byte, 1) == 0 ? 0 : 1;
    });
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    close(ready[1]);
    close(hold[0]);
    gate = hold[1];
    return child;
  }

  const std::string directory = ::testing::TempDir() + "kvq_listen_" + std::to_string(getpid());
  const std::string path = directory + "/kvqd.sock";
};

TEST_F(ListenSocketTest, ListensAndCleansUp) {
  {
    ListenSocket socket({.path = path});
    EXPECT_TRUE(connects(path));
    EXPECT_FALSE(socket.adopted());
    EXPECT_TRUE(fcntl(socket.fd(), F_GETFL) & O_NONBLOCK);
    EXPECT_TRUE(fcntl(socket.fd(), F_GETFD) & FD_CLOEXEC);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(refusal({.path = path}).has_value()) << "the path can be taken again";
}

TEST_F(ListenSocketTest, ModeIsWhatWasAskedWhateverTheUmask) {
  for (const mode_t mask : {0000, 0077}) {
    const mode_t before = umask(mask);
    ListenSocket socket({.path = path, .mode = 0660});
    umask(before);
    struct stat status {};
    ASSERT_EQ(stat(path.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07777, 0660u);
    ASSERT_EQ(stat((path + ".lock").c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 07077, 0u);
  }
}

TEST_F(ListenSocketTest, UnknownGroupIsNamed) {
  const auto error = refusal({.path = path, .group = "no-such-group"});
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, ExitCode::usage);
  EXPECT_THAT(error->what(), HasSubstr("groupadd no-such-group"));
  EXPECT_FALSE(std::filesystem::exists(path)) << "a refused start leaves nothing behind";
}

TEST_F(ListenSocketTest, SecondDaemonIsToldThePidOfTheFirst) {
  int gate = -1;
  const pid_t first = start_daemon(gate);
  for (int i = 0; i < 2; ++i) {  // twice: the refused one must not have damaged the lock file
    const auto error = refusal({.path = path});
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->code, ExitCode::already_running);
    EXPECT_THAT(error->what(), StartsWith("already running (pid " + std::to_string(first) + ") on " + path));
  }
  EXPECT_TRUE(connects(path));
  close(gate);
  EXPECT_EQ(exit_code_of(first), 0);
}

TEST_F(ListenSocketTest, SocketOfAKilledDaemonIsReplaced) {
  int gate = -1;
  const pid_t first = start_daemon(gate);
  kill(first, SIGKILL);
  EXPECT_EQ(exit_code_of(first), 128 + SIGKILL);
  ASSERT_TRUE(std::filesystem::exists(path));
  EXPECT_FALSE(connects(path));
  ListenSocket second({.path = path});
  EXPECT_TRUE(connects(path));
  close(gate);
}

TEST_F(ListenSocketTest, ForeignListenerIsNotRemoved) {
  const int foreign = plain_listener(path);
  const auto error = refusal({.path = path});
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, ExitCode::already_running);
  EXPECT_THAT(error->what(), HasSubstr("pid " + std::to_string(getpid())));
  EXPECT_TRUE(connects(path));
  close(foreign);
}

TEST_F(ListenSocketTest, OrdinaryFileIsNotRemoved) {
  std::ofstream(path) << "precious";
  const auto error = refusal({.path = path});
  ASSERT_TRUE(error.has_value());
  EXPECT_THAT(error->what(), HasSubstr("is not a socket"));
  EXPECT_EQ(std::filesystem::file_size(path), 8u);
}

TEST_F(ListenSocketTest, MissingDirectoryNamesTheFix) {
  const auto error = refusal({.path = directory + "/none/kvqd.sock"});
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, ExitCode::environment);
  EXPECT_THAT(error->what(), AllOf(HasSubstr("mkdir -p " + directory + "/none"), HasSubstr("RuntimeDirectory=kvq")));
}

TEST_F(ListenSocketTest, TooLongPathIsRefusedAndTheLongestWorks) {
  const auto padded = [&](std::size_t length) {
    return directory + "/" + std::string(length - directory.size() - 1, 'x');
  };
  EXPECT_FALSE(refusal({.path = padded(107)}).has_value());
  const auto error = refusal({.path = padded(108)});
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, ExitCode::usage);
  EXPECT_THAT(error->what(), HasSubstr("has 108 bytes"));
}

TEST_F(ListenSocketTest, OfManyStartingAtOnceExactlyOneServes) {
  constexpr int kRounds = 25, kDaemons = 6;
  for (int round = 0; round < kRounds; ++round) {
    if (round % 2 == 0) close(plain_listener(path));  // half of the rounds find a stale socket
    int go[2], results[2], hold[2];
    ASSERT_EQ(pipe2(go, O_CLOEXEC), 0);
    ASSERT_EQ(pipe2(results, O_CLOEXEC), 0);
    ASSERT_EQ(pipe2(hold, O_CLOEXEC), 0);
    std::vector<pid_t> children;
    for (int i = 0; i < kDaemons; ++i) {
      children.push_back(start([&] {
        close(go[1]);
        close(hold[1]);
        char byte;
        (void)!read(go[0], &byte, 1);  // all start when the parent closes its end
        try {
          ListenSocket socket({.path = path});
          (void)!write(results[1], "W", 1);
          (void)!read(hold[0], &byte, 1);
          return 0;
        } catch (const StartupError& error) {
          (void)!write(results[1], "L", 1);
          return static_cast<int>(error.code);
        }
      }));
    }
    close(go[0]);
    close(go[1]);
    std::string outcome;
    for (char byte; outcome.size() < kDaemons && read(results[0], &byte, 1) == 1;) outcome += byte;
    EXPECT_EQ(std::count(outcome.begin(), outcome.end(), 'W'), 1) << outcome;
    EXPECT_TRUE(connects(path));
    for (const int fd : {results[0], results[1], hold[0], hold[1]}) close(fd);
    int served = 0, refused = 0;
    for (const pid_t child : children) {
      const int code = exit_code_of(child);
      served += code == 0;
      refused += code == kAlreadyRunning;
    }
    EXPECT_EQ(served, 1);
    EXPECT_EQ(refused, kDaemons - 1);
    EXPECT_FALSE(std::filesystem::exists(path));
  }
}

// systemd's protocol: descriptors from 3 on, their number and the receiver's pid in the environment. In a child, since
// descriptor 3 of this process may be in use.
int adopt_in_child(const std::string& listen_path, const std::string& configured_path, int sockets) {
  return exit_code_of(start([&] {
    const int fd = plain_listener(listen_path);
    for (int i = 0; i < sockets; ++i) {
      if (dup2(fd, 3 + i) < 0) return 100;
    }
    setenv("LISTEN_PID", std::to_string(getpid()).c_str(), 1);
    setenv("LISTEN_FDS", std::to_string(sockets).c_str(), 1);
    try {
      {
        Intake intake = take_descriptors();
        ListenSocket socket({.path = configured_path, .handed = intake.socket.release()});
        if (!socket.adopted() || socket.fd() != 3 || !connects(listen_path)) return 101;
        if (!(fcntl(3, F_GETFD) & FD_CLOEXEC)) return 102;
      }
      return std::filesystem::exists(listen_path) ? 0 : 103;  // systemd owns the path
    } catch (const StartupError& error) {
      return static_cast<int>(error.code);
    }
  }));
}

TEST_F(ListenSocketTest, SocketFromSystemdIsAdopted) { EXPECT_EQ(adopt_in_child(path, path, 1), 0); }

TEST_F(ListenSocketTest, SocketFromSystemdAtAnotherPathIsRefused) {
  EXPECT_EQ(adopt_in_child(path, directory + "/other.sock", 1), static_cast<int>(ExitCode::usage));
}

TEST_F(ListenSocketTest, ASocketThatDoesNotListenIsRefusedAndClosed) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto error = refusal({.path = path, .handed = fd});
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code, ExitCode::usage);
  EXPECT_THAT(error->what(), HasSubstr("ListenStream="));
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

TEST_F(ListenSocketTest, TwoSocketsFromSystemdAreRefused) {
  EXPECT_EQ(adopt_in_child(path, path, 2), static_cast<int>(ExitCode::usage));
}

TEST(DirectoryOfTest, SplitsPaths) {
  EXPECT_EQ(directory_of("/run/kvq/kvqd.sock"), "/run/kvq");
  EXPECT_EQ(directory_of("/kvqd.sock"), "/");
  EXPECT_EQ(directory_of("kvqd.sock"), ".");
}

}  // namespace
}  // namespace kvq

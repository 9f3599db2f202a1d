// kvqd-gpu where it cannot work: it hides all GPUs from itself, so that these tests are the same on every machine.
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "daemon/gpu/worker_socket.h"

namespace kvq::gpu {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

struct Ended {
  int code = -1;
  std::string said;  // on stderr
};

// Runs the program; `socket` becomes its descriptor 3, -1: it has none.
Ended run(const std::vector<std::string>& arguments, int socket = -1) {
  int say[2];
  KVQ_ASSERT(::pipe(say) == 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
    ::dup2(say[1], STDERR_FILENO);
    if (socket >= 0) ::dup2(socket, kSocketFd);
    if (socket < 0) ::close(kSocketFd);
    std::string path = KVQD_GPU_PATH;
    std::vector<char*> argv = {path.data()};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(say[1]);
  Ended out;
  char text[512];
  for (ssize_t got; (got = ::read(say[0], text, sizeof text)) > 0;)
    out.said.append(text, static_cast<std::size_t>(got));
  ::close(say[0]);
  int status = 0;
  ::waitpid(pid, &status, 0);
  out.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return out;
}

const auto kCause =
    AnyOf(HasSubstr("no NVIDIA driver"), HasSubstr("no GPU is visible"), HasSubstr("install a newer driver"));

TEST(KvqdGpu, WrongUseIsOneLineThatShowsTheRightOne) {
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{},
                                             {"--help"},
                                             {"--uuid"},
                                             {"--list", "all"},
                                             {"--uuid", "GPU-1", "more"},
                                             {"GPU-1"},
                                             {"--uuid", "GPU-1", "--export", "ipc"},
                                             {"--uuid", "GPU-1", "--list", "vmm"}}) {
    const Ended ended = run(wrong);
    EXPECT_EQ(ended.code, 2);
    EXPECT_THAT(ended.said, HasSubstr("kvqd-gpu --list"));
    EXPECT_EQ(std::count(ended.said.begin(), ended.said.end(), '\n'), 1);
  }
}

TEST(KvqdGpu, WithoutAGpuItSaysTheCause) {
  for (const std::vector<std::string>& use : std::vector<std::vector<std::string>>{
           {"--list"}, {"--uuid", "GPU-1"}, {"--uuid", "GPU-1", "--export", "legacy"}}) {
    const Ended ended = run(use);
    EXPECT_EQ(ended.code, 3);
    EXPECT_THAT(ended.said, kCause);
    EXPECT_EQ(std::count(ended.said.begin(), ended.said.end(), '\n'), 1);
  }
}

TEST(KvqdGpu, WithoutAGpuItTellsKvqdTheCause) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  WorkerSocket kvqd{Descriptor(ends[0])};
  const Ended ended = run({"--uuid", "GPU-1"}, ends[1]);
  ::close(ends[1]);
  EXPECT_EQ(ended.code, 3);
  EXPECT_EQ(ended.said, "");
  Packet packet;
  ASSERT_EQ(kvqd.receive(packet), WorkerSocket::Got::message);
  EXPECT_EQ(packet.message.kind, MessageKind::failed);
  EXPECT_EQ(packet.message.index, kDeviceItself);
  EXPECT_THAT(packet.message.text, kCause);
  EXPECT_EQ(kvqd.receive(packet), WorkerSocket::Got::end);
}

}  // namespace
}  // namespace kvq::gpu

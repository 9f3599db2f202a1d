// What kvqd makes of a program that lists GPUs: real ones in place of the worker.
#include "daemon/gpu_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>

namespace kvq {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Script {
 public:
  explicit Script(const std::string& body)
      : path(::testing::TempDir() + "kvq_list_" + std::to_string(::getpid()) + "_" + std::to_string(++count)) {
    std::ofstream(path) << "#!/bin/sh\n" << body;
    ::chmod(path.c_str(), 0700);
  }
  ~Script() { ::unlink(path.c_str()); }
  const std::string path;
  static inline int count = 0;
};

TEST(GpuList, TakesEveryGpuOnceInTheOrderThatItIsGiven) {
  const Script script(
      "test \"$1\" = --list || exit 2\n"
      "echo a warning of the driver\n"
      "echo GPU-bbbb NVIDIA_H200 150000000000 140000000000\necho GPU-aaaa NVIDIA_H200 1 0\n"
      "echo GPU-bbbb again 1 1\necho MIG-cccc x 1 1\n");
  const GpuList list = list_gpus(script.path, 10'000);
  EXPECT_THAT(list.uuids, ElementsAre("GPU-bbbb", "GPU-aaaa", "MIG-cccc"));
  EXPECT_EQ(list.most_bytes, 150'000'000'000u);
  EXPECT_EQ(list.why_not, "");
}

TEST(GpuList, SaysWhyThereIsNone) {
  const Script speaks("echo kvqd-gpu: there is no libcuda >&2\nexit 3\n"), silent("exit 3\n"), dies("kill -9 $$\n");
  EXPECT_EQ(list_gpus(speaks.path, 10'000).why_not, speaks.path + " finds no GPU to work with: there is no libcuda");
  EXPECT_EQ(list_gpus(silent.path, 10'000).why_not,
            silent.path + " finds no GPU to work with: it ended with exit code 3");
  EXPECT_THAT(list_gpus(dies.path, 10'000).why_not, HasSubstr("signal 9"));
  const GpuList absent = list_gpus("/nowhere/kvqd-gpu", 10'000);
  EXPECT_THAT(absent.uuids, IsEmpty());
  EXPECT_EQ(absent.why_not,
            "/nowhere/kvqd-gpu cannot be started: No such file or directory; install kvqd-gpu, or give "
            "its path with --gpu-worker");
}

TEST(GpuList, AProgramThatHangsIsKilledAndSaid) {
  const Script script("exec sleep 1000\n");
  const auto start = std::chrono::steady_clock::now();
  const GpuList list = list_gpus(script.path, 100);
  EXPECT_THAT(list.why_not, HasSubstr("did not end within 100 ms"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));  // it would have slept on
}

}  // namespace
}  // namespace kvq

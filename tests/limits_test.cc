// Start-up checks on numbers from both sides of each boundary, and once on this machine.
#include "daemon/limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace kvq {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(LimitsTest, DescriptorLimitIsJudgedByItsHardSide) {
  EXPECT_FALSE(check_descriptors(1000, {10, 1000}).has_value());
  const auto problem = check_descriptors(1001, {10, 1000});
  ASSERT_TRUE(problem.has_value());
  EXPECT_THAT(*problem, AllOf(HasSubstr("limit is 1000"), HasSubstr("may need 1001"), HasSubstr("LimitNOFILE=1001"),
                              Not(HasSubstr("\n"))));
}

TEST(LimitsTest, EverySlabSessionAndTenantNeedsDescriptors) {
  const Needs base{.slabs = 4, .sessions = 4, .tenants = 4};
  Needs more = base;
  more.slabs = 5;
  EXPECT_GT(descriptors_needed(more), descriptors_needed(base));
  more = base;
  more.sessions = 5;
  EXPECT_GT(descriptors_needed(more), descriptors_needed(base));
  more = base;
  more.tenants = 5;
  EXPECT_GT(descriptors_needed(more), descriptors_needed(base));
}

TEST(LimitsTest, WhatIsKeptIsCountedAndMoreThanCanBeHandedOnIsSaid) {
  EXPECT_EQ(kept_needed({.slabs = 10, .sessions = 3, .tenants = 2}), 10u + 3 * 4 + 2 * 3 + 8);
  const Needs needs{.slabs = 10, .sessions = 3, .tenants = 2};
  EXPECT_GT(descriptors_needed(needs), 2 * kept_needed(needs)) << "each may have a duplicate that waits to be kept";
  EXPECT_FALSE(check_kept(5000).has_value());
  EXPECT_THAT(*check_kept(5001), AllOf(HasSubstr("may keep 5001"), HasSubstr("5000"), HasSubstr("raise slab_bytes")));
}

TEST(LimitsTest, AnArenaGrowsAsFarAsTheMachineAllows) {
  const Needs host{.arena_bytes = 10 << 20, .slabs = 10, .sessions = 1, .tenants = 1};
  const Room large{.memory_bytes = 1 << 30, .descriptors = 1'000'000};
  EXPECT_EQ(most_slabs(host, large), 640u) << "64 times the start";
  EXPECT_EQ(most_slabs(host, {.memory_bytes = 33 << 20, .descriptors = 1'000'000}), 33u);
  EXPECT_EQ(most_slabs(host, {.memory_bytes = 0, .descriptors = 1'000'000}), 640u) << "unknown bounds nothing";
  EXPECT_EQ(most_slabs(host, {.memory_bytes = 5 << 20, .descriptors = 1'000'000}), 10u) << "never below the start";
  EXPECT_EQ(most_slabs(host, {.memory_bytes = 1 << 30, .descriptors = 1'000'000, .fixed = true}), 10u);
  Room few = large;
  few.descriptors = descriptors_needed(host) + 3 * 5 + 2;
  EXPECT_EQ(most_slabs(host, few), 15u) << "a slab takes three";
  few.descriptors = 1;
  EXPECT_EQ(most_slabs(host, few), 10u);
  Needs kept = host;
  kept.slabs = 1000, kept.arena_bytes = 1000 << 20, kept.kept = true;
  const Room memory{.memory_bytes = std::uint64_t{1} << 40, .descriptors = 1'000'000};
  EXPECT_EQ(most_slabs(kept, memory), 5000 - kept_needed(kept) + 1000) << "no more than the next kvqd can be handed";
  Needs gpus{.devices = 2, .gpus = true, .slabs = 100};
  EXPECT_EQ(most_slabs(gpus, {.memory_bytes = 1, .descriptors = 1'000'000}), 6400u) << "pages are in the GPU's memory";
}

TEST(LimitsTest, GpuNeedsAMirrorForEachTenantAndWhatItsWorkerIsServedBy) {
  const Needs host{.devices = 2, .slabs = 10, .sessions = 3, .tenants = 4};
  Needs gpus = host;
  gpus.gpus = true;
  EXPECT_EQ(kept_needed(gpus), kept_needed(host) + 2 * (4 + 1)) << "mirrors, and the worker's pidfd";
  // Mirrors and pidfd, each with a duplicate; socket, rings, bells, epoll set, timer; and what a start takes.
  EXPECT_EQ(descriptors_needed(gpus), descriptors_needed(host) + 2 * (2 * (4 + 1) + 6 + 5));
  EXPECT_GE(descriptors_needed(gpus), 2 * kept_needed(gpus));
}

TEST(LimitsTest, ArenaAboveMemoryNamesBothNumbers) {
  EXPECT_FALSE(check_memory(100, 100, "the machine's memory").has_value());
  EXPECT_FALSE(check_memory(100, 0, "the machine's memory").has_value()) << "unknown is not refused";
  EXPECT_EQ(check_memory(101, 100, "the machine's memory"),
            "arena_bytes is 101, the machine's memory is 100 bytes: lower arena_bytes or raise the limit");
}

TEST(LimitsTest, LockableMemoryIsJudgedByItsHardSide) {
  EXPECT_FALSE(check_lockable(100, {0, 100}).has_value());
  EXPECT_THAT(*check_lockable(101, {0, 100}),
              AllOf(HasSubstr("100 bytes"), HasSubstr("101"), HasSubstr("LimitMEMLOCK")));
}

TEST(LimitsTest, ProcessorMustBeKnownAndLittleEndian) {
  Problem slow;
  EXPECT_THAT(*check_processor({.architecture = "riscv64"}, slow), HasSubstr("is riscv64"));
  EXPECT_THAT(*check_processor({.architecture = "aarch64", .little_endian = false}, slow), HasSubstr("big-endian"));
  EXPECT_FALSE(check_processor({.architecture = "aarch64"}, slow).has_value());
  EXPECT_THAT(*check_processor({.architecture = "x86_64", .vectors = false}, slow), HasSubstr("SSSE3"));
  EXPECT_FALSE(check_processor({.architecture = "x86_64", .avx2 = true, .f16c = true, .fma = true}, slow).has_value());
  EXPECT_FALSE(slow.has_value());
  EXPECT_FALSE(check_processor({.architecture = "x86_64", .avx2 = true}, slow).has_value());
  ASSERT_TRUE(slow.has_value());
  EXPECT_THAT(*slow, HasSubstr("F16C"));
}

TEST(LimitsTest, MemoryFilesAreParsed) {
  EXPECT_EQ(parse_memory_total("MemTotal:       24684092 kB\nMemFree: 1 kB\n"), 24684092ull * 1024);
  EXPECT_EQ(parse_memory_total("MemFree: 1 kB\n"), 0u);
  EXPECT_EQ(parse_group_limit("1073741824\n"), 1ull << 30);
  EXPECT_FALSE(parse_group_limit("max\n").has_value());
  EXPECT_FALSE(parse_group_limit("").has_value());
}

TEST(LimitsTest, ControlGroupAndItsParentsAreAsked) {
  EXPECT_THAT(group_limit_files("0::/system.slice/kvqd.service\n"),
              ElementsAre("/sys/fs/cgroup/system.slice/kvqd.service/memory.max",
                          "/sys/fs/cgroup/system.slice/memory.max", "/sys/fs/cgroup/memory.max"));
  EXPECT_THAT(
      group_limit_files("5:devices:/\n4:memory:/box\n1:cpu,memory:/\n"),
      ElementsAre("/sys/fs/cgroup/memory/box/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                  "/sys/fs/cgroup/memory/memory.limit_in_bytes"));
  EXPECT_THAT(group_limit_files("garbage\n"), ElementsAre());
}

class LimitsDirectoryTest : public ::testing::Test {
 protected:
  LimitsDirectoryTest() { std::filesystem::create_directories(directory); }
  ~LimitsDirectoryTest() override { std::filesystem::remove_all(directory); }
  const std::string directory = ::testing::TempDir() + "kvq_limits_" + std::to_string(getpid());
};

TEST_F(LimitsDirectoryTest, MissingDirectoryNamesMkdirAndTheUnit) {
  EXPECT_FALSE(check_directory(directory).has_value());
  EXPECT_THAT(*check_directory(directory + "/none"), AllOf(HasSubstr("mkdir -p"), HasSubstr("RuntimeDirectory=kvq")));
  std::ofstream(directory + "/file") << "x";
  EXPECT_THAT(*check_directory(directory + "/file"), HasSubstr("is not a directory"));
}

TEST_F(LimitsDirectoryTest, UnwritableDirectoryNamesTheUser) {
  // In a child without root's rights, since root may write anywhere.
  std::filesystem::permissions(directory, std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const pid_t child = fork();
  if (child == 0) {
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) _exit(2);
    const auto problem = check_directory(directory);
    _exit(problem && problem->find("not writable for uid") != std::string::npos ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(LimitsDirectoryTest, SoftDescriptorLimitIsRaised) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const Needs needs{.arena_bytes = 1 << 20, .slabs = 4, .sessions = 4, .tenants = 1, .runtime_directory = directory};
  const rlimit low{descriptors_needed(needs) - 1, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  (void)check_environment(needs);
  rlimit after{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &after), 0);
  Needs grown = needs;
  grown.slabs = 64 * needs.slabs;
  EXPECT_EQ(after.rlim_cur, std::min<std::uint64_t>(descriptors_needed(grown), before.rlim_max))
      << "for as far as the arena may grow, where the hard limit allows it";
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST_F(LimitsDirectoryTest, ImpossibleNeedsAreRefusedAsEnvironment) {
  const auto code_of = [](const Needs& needs) {
    try {
      (void)check_environment(needs);
    } catch (const StartupError& error) {
      EXPECT_THAT(error.what(), Not(HasSubstr("\n")));
      return error.code;
    }
    return ExitCode::ok;
  };
  Needs needs{.arena_bytes = 1 << 20, .slabs = 4, .sessions = 4, .tenants = 1, .runtime_directory = directory};
  EXPECT_EQ(code_of(needs), ExitCode::ok);
  needs.arena_bytes = 1ull << 50;
  EXPECT_EQ(code_of(needs), ExitCode::environment);
  needs.arena_bytes = 1 << 20;
  needs.slabs = 1ull << 40;
  EXPECT_EQ(code_of(needs), ExitCode::environment);
  needs.slabs = 4;
  needs.runtime_directory += "/none";
  EXPECT_EQ(code_of(needs), ExitCode::environment);
}

TEST(LimitsTest, SealedMemfdWorksHere) { EXPECT_EQ(check_memfd(), std::nullopt); }

}  // namespace
}  // namespace kvq

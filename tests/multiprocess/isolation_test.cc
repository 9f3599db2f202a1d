// Tenants share nothing; descriptors permit nothing that the protocol does not need.
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <set>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_session.h"
#include "tests/support/role_process.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

constexpr uid_t kOtherUser = 65534;  // nobody, as nogroup

// Becomes the other user and looks for the tokens that root has cached.
KVQ_ROLE(stranger) {
  if (::setgroups(0, nullptr) != 0 || ::setgid(kOtherUser) != 0 || ::setuid(kOtherUser) != 0) return 2;
  TinyModel tiny(arguments[0], {});
  const auto tokens = token_stream(1, 128);
  std::uint64_t cached = 1;
  Sequence sequence = tiny.model().open(tokens, &cached);
  say("tenant " + std::to_string(tiny.model().info().tenant) + " cached " +
      std::to_string(tiny.model().lookup(tokens).cached_tokens + cached));
  tiny.write(sequence, 0, tokens);
  check(kvq_credits_request(tiny.get(), 1, 1000));
  say("own " + std::to_string(tiny.model().lookup(tokens).cached_tokens));
  RawSession raw(arguments[0]);
  raw.register_model(kContractVersion, nullptr);
  for (const auto& [id, slab] : raw.slabs()) {
    struct stat info {};
    ::fstat(slab.fd, &info);
    say("inode " + std::to_string(info.st_ino));
  }
  say("end");
  hear();
  return 0;
}

TEST(Tenants, SameTokensOfAnotherTenantAreNoHitAndNoDescriptorIsShared) {
  ASSERT_EQ(::geteuid(), 0u) << "run as root: this test becomes another user";
  DaemonProcess daemon(calm_settings() +
                       "socket_group = \"nogroup\"\n[[tenants]]\nname = \"mine\"\nuids = [0]\n"
                       "[[tenants]]\nname = \"theirs\"\nuids = [65534]\n");
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 128);
  Sequence sequence = tiny.model().open({});
  tiny.write(sequence, 0, tokens);
  tiny.await_cached(tokens, 128);

  RoleProcess stranger("stranger", {daemon.socket()});
  EXPECT_EQ(stranger.hear(), "tenant " + std::to_string(tiny.model().info().tenant + 1) + " cached 0");
  EXPECT_EQ(stranger.hear().substr(0, 4), "own ");
  std::set<std::string> theirs, mine;
  for (std::string line = stranger.hear(); line != "end"; line = stranger.hear()) theirs.insert(line);
  RawSession raw(daemon.socket());
  ASSERT_EQ(raw.register_model(kContractVersion, nullptr), 0);
  for (const auto& [id, slab] : raw.slabs()) {
    struct stat info {};
    ASSERT_EQ(::fstat(slab.fd, &info), 0);
    mine.insert("inode " + std::to_string(info.st_ino));
  }
  EXPECT_FALSE(theirs.empty());
  EXPECT_FALSE(mine.empty());
  for (const std::string& inode : theirs) EXPECT_EQ(mine.count(inode), 0u) << inode;
  stranger.say("end");
  EXPECT_EQ(stranger.wait(), 0);
}

bool maps_writable(int fd) {
  void* at = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return false;
  ::munmap(at, 4096);
  return true;
}

bool resizes(int fd, off_t to) { return ::ftruncate(fd, to) == 0; }

TEST(Protection, DirectoryPrefixTableAndQuantizedSlabsAreReadOnlyAndNothingCanBeResized) {
  DaemonProcess daemon(calm_settings());
  TinyModel tiny(daemon.socket(), {});
  const auto tokens = token_stream(1, 256);
  {
    Sequence sequence = tiny.model().open({});
    tiny.write(sequence, 0, tokens);
  }
  RawSession raw(daemon.socket());
  ASSERT_EQ(raw.register_model(kContractVersion, nullptr), 0);
  tiny.await_cached(tokens, 256);
  raw.quantize();
  tiny.await_quantized(tokens, 256);

  const int directory = raw.descriptor("directory"), prefix = raw.descriptor("prefixTable"),
            segment = raw.descriptor("segment");
  EXPECT_FALSE(maps_writable(directory));
  EXPECT_FALSE(maps_writable(prefix));
  EXPECT_TRUE(maps_writable(segment));
  std::size_t writable = 0, read_only = 0;
  for (const auto& [id, slab] : raw.slabs()) {
    EXPECT_EQ(maps_writable(slab.fd), slab.writable) << "slab " << id;
    ++(slab.writable ? writable : read_only);
    EXPECT_FALSE(resizes(slab.fd, 0)) << "slab " << id;
    EXPECT_FALSE(resizes(slab.fd, 1 << 20)) << "slab " << id;
  }
  EXPECT_GE(writable, 1u);
  EXPECT_GE(read_only, 1u);
  for (const int fd : {directory, prefix, segment}) {
    EXPECT_FALSE(resizes(fd, 0));
    EXPECT_FALSE(resizes(fd, 1 << 24));
  }
}

}  // namespace
}  // namespace kvq::test

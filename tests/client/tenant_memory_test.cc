// One mapping per process and slab, whoever asks for it; and shared memory of the wrong kind refused by name.
#include "client/tenant_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "client/last_error.h"

namespace kvq::client {
namespace {

constexpr std::uint64_t kSlabBytes = 1 << 16, kArenaBytes = 4 * kSlabBytes, kBuckets = 64;
constexpr std::uint32_t kCapacity = 16;
constexpr TenantId kTenant{3};

struct Memfd {
  explicit Memfd(std::uint64_t bytes) : fd(::memfd_create("kvq-test", MFD_CLOEXEC)) {
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(bytes)), 0);
  }
  ~Memfd() { ::close(fd); }
  Memfd(const Memfd&) = delete;
  template <typename T>
  void put(const T& value) const {
    EXPECT_EQ(::pwrite(fd, &value, sizeof(T), 0), static_cast<ssize_t>(sizeof(T)));
  }
  const int fd;
};

struct Head {  // the plain part of a DirectoryHeader
  std::uint64_t magic = kDirectoryMagic;
  std::uint32_t version = kContractVersion, capacity = kCapacity;
  TenantId tenant = kTenant;
  std::uint32_t reserved = 0;
  std::uint64_t arena_bytes = kArenaBytes, slab_bytes = kSlabBytes, buckets = kBuckets;
};
static_assert(sizeof(Head) == offsetof(DirectoryHeader, prefix_buckets) + 8);

struct PrefixHead {
  std::uint64_t magic = kPrefixMagic;
  std::uint32_t version = kContractVersion;
  TenantId tenant = kTenant;
  std::uint64_t buckets = kBuckets;
};

std::uint64_t next_instance() {
  static std::uint64_t instance = 1000;
  return ++instance;
}

TenantMemory::Shape shape(std::uint64_t instance) { return {instance, kTenant, kArenaBytes, kSlabBytes}; }

// Permissions of the mapping at `address`, such as "rw-s".
std::string permissions(const void* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    char text[5] = "";
    std::sscanf(line.c_str(), "%llx-%llx %4s", &begin, &end, text);
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (begin <= at && at < end) return text;
  }
  return "none";
}

TEST(TenantMemory, IsOnePerInstanceAndTenantWhileUsed) {
  const std::uint64_t instance = next_instance();
  const auto one = TenantMemory::of(shape(instance)), again = TenantMemory::of(shape(instance));
  EXPECT_EQ(one, again);
  EXPECT_NE(one, TenantMemory::of(shape(next_instance())));
}

TEST(TenantMemory, SlabOfTwoSessionsIsMappedOnceUntilBothLetGo) {
  const auto memory = TenantMemory::of(shape(next_instance()));
  const Memfd slab(kSlabBytes);
  slab.put(std::uint64_t{42});
  ASSERT_EQ(memory->map_slab(SessionId{1}, SlabId{2}, slab.fd, 1, true), KVQ_OK);
  ASSERT_EQ(memory->map_slab(SessionId{2}, SlabId{2}, slab.fd, 1, true), KVQ_OK);
  ASSERT_EQ(memory->map_slab(SessionId{2}, SlabId{2}, slab.fd, 1, true), KVQ_OK);  // announced again: counted once
  std::byte* place = memory->arena() + 2 * kSlabBytes;
  EXPECT_EQ(*reinterpret_cast<std::uint64_t*>(place), 42u);
  EXPECT_EQ(permissions(place), "rw-s");
  memory->unmap_slab(SessionId{1}, SlabId{2});
  memory->unmap_slab(SessionId{1}, SlabId{2});  // twice by one session counts once
  EXPECT_EQ(permissions(place), "rw-s");
  memory->forget_session(SessionId{2});
  EXPECT_EQ(permissions(place), "---p");
  EXPECT_EQ(memory->mapped_slabs(), 0u);
}

TEST(TenantMemory, AnotherFileInPlaceOfASlabReplacesIt) {
  const auto memory = TenantMemory::of(shape(next_instance()));
  const Memfd dead(kSlabBytes), slab(kSlabBytes);
  slab.put(std::uint64_t{42});
  ASSERT_EQ(memory->map_slab(SessionId{1}, SlabId{2}, dead.fd, 2, true), KVQ_OK);
  ASSERT_EQ(memory->map_slab(SessionId{1}, SlabId{2}, slab.fd, 1, false), KVQ_OK);
  std::byte* place = memory->arena() + 2 * kSlabBytes;
  EXPECT_EQ(*reinterpret_cast<std::uint64_t*>(place), 42u);
  EXPECT_EQ(permissions(place), "r--s");
  memory->unmap_slab(SessionId{1}, SlabId{3});  // not mapped: nothing
  memory->unmap_slab(SessionId{1}, SlabId{2});
  EXPECT_EQ(permissions(place), "---p");
}

TEST(TenantMemory, ReadOnlySlabIsMappedReadOnly) {
  const auto memory = TenantMemory::of(shape(next_instance()));
  const Memfd slab(kSlabBytes);
  ASSERT_EQ(memory->map_slab(SessionId{1}, SlabId{0}, slab.fd, 1, false), KVQ_OK);
  EXPECT_EQ(permissions(memory->arena()), "r--s");
  EXPECT_EQ(memory->map_slab(SessionId{2}, SlabId{0}, slab.fd, 1, true), KVQ_ERR_SYSTEM);
}

TEST(TenantMemory, SlabOutsideTheArenaOrTooShortIsRefused) {
  const auto memory = TenantMemory::of(shape(next_instance()));
  const Memfd slab(kSlabBytes), half(kSlabBytes / 2);
  EXPECT_EQ(memory->map_slab(SessionId{1}, SlabId{4}, slab.fd, 1, true), KVQ_ERR_VERSION_MISMATCH);
  EXPECT_EQ(memory->map_slab(SessionId{1}, SlabId{3}, half.fd, 1, true), KVQ_ERR_VERSION_MISMATCH);
  EXPECT_EQ(memory->map_slab(SessionId{1}, SlabId{3}, slab.fd, 1, true), KVQ_OK);
}

kvq_status map_with(const Head& head, const PrefixHead& prefix, std::uint64_t directory_size) {
  const Memfd directory(directory_size), table(prefix_table_bytes(kBuckets));
  directory.put(head);
  table.put(prefix);
  return TenantMemory::of(shape(next_instance()))->map_tables(directory.fd, table.fd);
}

TEST(TenantMemory, HeadersOfAnotherVersionOrShapeAreRefusedByName) {
  const std::uint64_t whole = directory_bytes(kCapacity);
  EXPECT_EQ(map_with({}, {}, whole), KVQ_OK);
  const auto refused = [&](const Head& head, const PrefixHead& prefix, const char* word, std::uint64_t size) {
    EXPECT_EQ(map_with(head, prefix, size), KVQ_ERR_VERSION_MISMATCH) << word;
    EXPECT_NE(std::strstr(last_error(), word), nullptr) << last_error();
    EXPECT_NE(std::strstr(last_error(), "one release"), nullptr) << last_error();
  };
  refused({.magic = 1}, {}, "magic", whole);
  refused({.version = kContractVersion + 1}, {}, "version 2", whole);
  refused({.tenant = TenantId{4}}, {}, "tenant is 4", whole);
  refused({.arena_bytes = 1}, {}, "arena_bytes", whole);
  refused({.slab_bytes = 1}, {}, "slab_bytes", whole);
  refused({.buckets = 128}, {}, "buckets", whole);
  refused({}, {}, "bytes long", whole - 8);
  refused({}, {.version = 9}, "version 9", whole);
}

}  // namespace
}  // namespace kvq::client

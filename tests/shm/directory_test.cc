// Memory files between two real processes: no torn entry, no write through a reader's descriptor, no truncation.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/shm/directory_writer.h"
#include "daemon/shm/prefix_file.h"
#include "daemon/shm/table_file.h"

namespace kvq {
namespace {

DirectoryWriter make_directory(std::uint32_t capacity = 64) {
  auto made = DirectoryWriter::create({.tenant = TenantId{3},
                                       .capacity = capacity,
                                       .arena_bytes = 1 << 20,
                                       .slab_bytes = 1 << 16,
                                       .prefix_buckets = 128});
  EXPECT_TRUE(made);
  return std::move(*made);
}

// Runs `body` in a child process; its result is the exit status.
template <typename Body>
int in_child(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

const std::byte* map_read_only(int fd, std::uint64_t bytes) {
  void* p = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  return p == MAP_FAILED ? nullptr : static_cast<const std::byte*>(p);
}

TEST(Directory, ReaderInAnotherProcessNeverSeesATornEntry) {
  DirectoryWriter writer = make_directory();
  // Every published entry has generation = offset / 256 = 17 * format, so that any mixture shows.
  const auto entry = [](std::uint32_t i) {
    const std::uint32_t f = 1 + i % 5;
    return Entry{static_cast<std::uint16_t>(17 * f), static_cast<Format>(f), EntryState::sealed,
                 17 * f * kOffsetUnitBytes};
  };
  writer.publish(PageId{1}, entry(0));
  const pid_t reader = ::fork();
  if (reader == 0) {
    const std::byte* base = map_read_only(writer.read_only_descriptor(), directory_bytes(64));
    if (base == nullptr) ::_exit(2);
    const auto* entries = reinterpret_cast<const DirectoryEntry*>(base + sizeof(DirectoryHeader));
    std::uint32_t seen = 0;
    for (int i = 0; i < 300'000'000 && (seen != 62 || i < 1'000'000); ++i) {
      if (i % 1024 == 0) ::sched_yield();  // on one core the writer has to run too
      const Entry e = unpack_entry(entries[1].load(std::memory_order_acquire));
      const auto f = static_cast<std::uint32_t>(e.format);
      if (e.generation != 17 * f || e.offset_bytes != 17 * f * kOffsetUnitBytes || e.state != EntryState::sealed)
        ::_exit(1);
      seen |= 1u << f;
    }
    ::_exit(seen == 62 ? 0 : 3);  // all five formats were seen
  }
  int status = 0;
  for (std::uint32_t i = 0; ::waitpid(reader, &status, WNOHANG) == 0; ++i) writer.publish(PageId{1}, entry(i));
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Directory, ReadersDescriptorCannotBeMappedWritable) {
  DirectoryWriter writer = make_directory();
  EXPECT_EQ(in_child([&] {
              void* p = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, writer.read_only_descriptor(), 0);
              return p == MAP_FAILED && errno == EACCES ? 0 : 1;
            }),
            0);
}

TEST(Directory, WriteThroughAReadOnlyMappingKillsTheWriterAlone) {
  DirectoryWriter writer = make_directory();
  writer.publish(PageId{1}, {5, Format::dense, EntryState::sealed, 0});
  EXPECT_EQ(in_child([&] {
              ::signal(SIGSEGV, SIG_DFL);
              const std::byte* base = map_read_only(writer.read_only_descriptor(), directory_bytes(64));
              const_cast<volatile std::byte*>(base)[sizeof(DirectoryHeader) + 8] = std::byte{1};
              return 0;
            }),
            128 + SIGSEGV);
  EXPECT_EQ(writer.entry(PageId{1}).generation, 5);
}

TEST(Directory, NobodyCanTruncateGrowOrSealIt) {
  DirectoryWriter writer = make_directory();
  for (int fd : {writer.descriptor(), writer.read_only_descriptor()}) {
    EXPECT_NE(::ftruncate(fd, 0), 0);
    EXPECT_NE(::ftruncate(fd, 1 << 24), 0);
    EXPECT_NE(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
  }
  EXPECT_EQ(::fcntl(writer.descriptor(), F_GET_SEALS), F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
}

TEST(Directory, MemoryIsAllocatedFromTheStart) {
  auto file = Memfd::create("kvq-test", 1 << 20);
  ASSERT_TRUE(file);
  struct stat st {};
  ASSERT_EQ(::fstat(file->descriptor(), &st), 0);
  EXPECT_GE(st.st_blocks * 512, 1 << 20);
  EXPECT_EQ(st.st_mode & 0777, 0600u);
  EXPECT_EQ(file->bytes(), std::uint64_t{1 << 20});
  for (std::uint64_t i = 0; i < file->bytes(); i += 4096) ASSERT_EQ(file->data()[i], std::byte{0});
}

TEST(Directory, HeaderTellsVersionAndShape) {
  DirectoryWriter writer = make_directory(64);
  const auto* h = reinterpret_cast<const DirectoryHeader*>(map_read_only(writer.read_only_descriptor(), 4096));
  ASSERT_NE(h, nullptr);
  EXPECT_EQ(h->magic, kDirectoryMagic);
  EXPECT_EQ(h->version, kContractVersion);
  EXPECT_EQ(h->capacity, 64u);
  EXPECT_EQ(h->tenant, TenantId{3});
  EXPECT_EQ(h->epoch.load(), 1u);
  EXPECT_EQ(writer.entry(kNullPage).state, EntryState::null);
  writer.advance_epoch();
  EXPECT_EQ(h->epoch.load(), 2u);
  EXPECT_EQ(writer.epoch(), Epoch{2});
}

TEST(Directory, ReaderOfAnotherVersionCanTell) {
  DirectoryWriter writer = make_directory();
  void* p = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, writer.descriptor(), 0);
  ASSERT_NE(p, MAP_FAILED);
  static_cast<DirectoryHeader*>(p)->version = kContractVersion + 1;
  EXPECT_EQ(in_child([&] {
              const auto* h =
                  reinterpret_cast<const DirectoryHeader*>(map_read_only(writer.read_only_descriptor(), 4096));
              return h->magic == kDirectoryMagic && h->version != kContractVersion ? 0 : 1;
            }),
            0);
}

TEST(TableFile, HeaderSaysWhatTheRecordsAre) {
  struct Record {
    std::uint64_t a, b;
  };
  auto file = TableFile<Record>::create("kvq-test", TableKind::pages, TenantId{4}, 10);
  ASSERT_TRUE(file);
  const auto* h = reinterpret_cast<const TableHeader*>(map_read_only(file->descriptor(), 4096));
  EXPECT_EQ(h->magic, kTableMagic);
  EXPECT_EQ(h->version, kStateVersion);
  EXPECT_EQ(h->record_bytes, 16u);
  EXPECT_EQ(h->count, 10u);
  EXPECT_EQ(file->records().size(), 10u);
  file->records()[9] = {7, 8};
  EXPECT_EQ(reinterpret_cast<const Record*>(reinterpret_cast<const std::byte*>(h) + sizeof(TableHeader))[9].b, 8u);
}

TEST(Memfd, FileLimitIsAnErrorNotASignal) {
  EXPECT_EQ(in_child([] {
              ::signal(SIGXFSZ, SIG_IGN);
              const rlimit limit{65536, 65536};
              if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
              const auto file = Memfd::create("kvq-test", 1 << 20);
              return !file && file.error().code == Errc::system && file.error().native == EFBIG ? 0 : 1;
            }),
            0);
}

}  // namespace
}  // namespace kvq

// The memory of a FakeDaemon: one tenant's directory, prefix table and slabs, and the segments of its sessions.
//
// Invariant: files live as long as the object, whatever happens to the daemon; page p is in slot p - 1 of the arena.
#pragma once

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <vector>

#include "kvq/directory.h"
#include "kvq/page_format.h"
#include "kvq/prefix_table.h"
#include "kvq/segment.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {

inline constexpr std::uint64_t kFakeSlabBytes = 256 << 10, kFakeArenaBytes = 4 << 20, kFakeBuckets = 1024;
inline constexpr std::uint32_t kFakeCapacity = 1024;

struct FakeFile {
  explicit FakeFile(std::uint64_t size) : fd(::memfd_create("kvq-fake", MFD_CLOEXEC)), bytes(size) {
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(size)) != 0) throw std::runtime_error("memfd");
    data = static_cast<std::byte*>(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    if (data == MAP_FAILED) throw std::runtime_error("mmap");
  }
  ~FakeFile() {
    ::munmap(data, bytes);
    ::close(fd);
  }
  FakeFile(const FakeFile&) = delete;
  FakeFile& operator=(const FakeFile&) = delete;
  const int fd;
  const std::uint64_t bytes;
  std::byte* data;
};

struct FakeSegment {
  FakeSegment(std::uint32_t id, TenantId tenant) : file(kSegmentBytes) {
    SegmentHeader& h = words().header;
    h.magic = kSegmentMagic;
    h.version = kContractVersion;
    h.session = SessionId{id};
    h.tenant = tenant;
    h.bytes = kSegmentBytes;
    for (std::size_t i = 0; i < sizeof(h.token); ++i) h.token[i] = static_cast<std::uint8_t>(id * 17 + i);
    std::memcpy(token.data(), h.token, sizeof(h.token));
  }
  ~FakeSegment() {
    ::close(doorbell);
    ::close(notice);
  }
  Segment& words() const { return *reinterpret_cast<Segment*>(file.data); }
  FakeFile file;
  const int doorbell = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), notice = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::array<std::uint8_t, 16> token{};  // the daemon's own copy
};

class FakeMemory {
 public:
  static constexpr TenantId kTenant{7};

  FakeMemory() : directory(directory_bytes(kFakeCapacity)), prefix(prefix_table_bytes(kFakeBuckets)) {
    auto& d = *reinterpret_cast<DirectoryHeader*>(directory.data);
    d.magic = kDirectoryMagic;
    d.version = kContractVersion;
    d.capacity = kFakeCapacity;
    d.tenant = kTenant;
    d.arena_bytes = kFakeArenaBytes;
    d.slab_bytes = kFakeSlabBytes;
    d.prefix_buckets = kFakeBuckets;
    d.epoch.store(1);
    auto& p = *reinterpret_cast<PrefixHeader*>(prefix.data);
    p.magic = kPrefixMagic;
    p.version = kContractVersion;
    p.tenant = kTenant;
    p.buckets = kFakeBuckets;
    publish(0, EntryState::null, 0);
    for (int i = 0; i < 4; ++i) add_slab();
  }

  void add_slab() {
    const std::uint32_t pages = static_cast<std::uint32_t>(kFakeSlabBytes / page_bytes());
    const std::uint32_t first = static_cast<std::uint32_t>(slabs.size()) * pages + 1;
    slabs.push_back(std::make_unique<FakeFile>(kFakeSlabBytes));
    for (std::uint32_t page = first; page < first + pages; ++page) free.push_back(page);
  }

  // A page to write; throws when none is left.
  MagazineItem take() {
    if (free.empty()) throw std::runtime_error("the fake daemon has no page left");
    const std::uint32_t page = free.front();
    free.erase(free.begin());
    const auto generation = ++generations[page];
    publish(page, EntryState::open, generation);
    return {PageId{page}, generation, 0};
  }
  void give_back(std::uint32_t page) {
    if (sealed.count(page) == 0) free.push_back(page);  // sealed ones stay cached
  }

  void seal(std::uint32_t page, const Key& key) {
    sealed.insert(page);
    publish(page, EntryState::sealed, generations[page]);
    auto* buckets = reinterpret_cast<Bucket*>(prefix.data + sizeof(PrefixHeader));
    std::uint64_t at = key_word(key, 2) & (kFakeBuckets - 1);
    while (buckets[at].value.load() != 0) at = (at + 1) & (kFakeBuckets - 1);
    buckets[at].tag[0].store(key_word(key, 0));
    buckets[at].tag[1].store(key_word(key, 1));
    buckets[at].value.store(std::uint64_t{generations[page]} << 32 | page, std::memory_order_release);
  }

  // The pages lie in another memory from now on; all entries are shown to `mirror`.
  void move_to(std::uint64_t slab_bytes, std::function<void(std::uint32_t, std::uint64_t)> mirror) {
    auto& d = *reinterpret_cast<DirectoryHeader*>(directory.data);
    d.arena_bytes = d.slab_bytes = slab_bytes;
    while (slabs.size() * kFakeSlabBytes < slab_bytes) add_slab();  // its pages; the files stay empty
    mirror_ = std::move(mirror);
    for (std::uint32_t page = 0; page < kFakeCapacity; ++page) mirror_(page, entries()[page].load());
  }

  FakeFile directory, prefix;
  std::vector<std::unique_ptr<FakeFile>> slabs;
  std::vector<std::uint32_t> free;
  std::set<std::uint32_t> sealed;
  std::map<std::uint32_t, std::uint16_t> generations;

 private:
  DirectoryEntry* entries() const {
    return reinterpret_cast<DirectoryEntry*>(directory.data + sizeof(DirectoryHeader));
  }
  static std::uint64_t page_bytes() {
    ModelGeometry g;
    g.layers = kLayers;
    for (std::uint32_t i = 0; i < kLayers; ++i) g.layer[i] = {kKvHeads, kHeadDim, Dtype::fp16, 0};
    return make_layout(g, Format::dense).page_bytes;
  }
  void publish(std::uint32_t page, EntryState state, std::uint16_t generation) {
    const Format format = state == EntryState::null ? Format::none : Format::dense;
    const std::uint64_t offset = page == 0 ? 0 : (page - 1) * page_bytes();
    const std::uint64_t entry = pack_entry({generation, format, state, offset});
    if (mirror_) mirror_(page, entry);
    entries()[page].store(entry, std::memory_order_release);
  }
  std::function<void(std::uint32_t, std::uint64_t)> mirror_;
};

}  // namespace kvq::test

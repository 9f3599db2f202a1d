// A client as the daemon sees it, without RPC: maps what it is given, writes its segment, reads pages as kernels do.
//
// Invariant: it follows the protocol of kvq/segment.h to the letter; tests that need a hostile client reach into
// `segment()` themselves. A page's bytes are one fp16 value everywhere, which every format keeps exactly.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <map>
#include <optional>

#include "daemon/store.h"
#include "kvq/directory.h"
#include "kvq/segment.h"

namespace kvq::testing {

inline std::byte* map_file(int fd, std::uint64_t bytes, bool writable) {
  void* p = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
  EXPECT_NE(p, MAP_FAILED);
  return static_cast<std::byte*>(p);
}

class SimClient {
 public:
  SimClient(Store& store, TenantId tenant, const ModelGeometry& geometry, std::uint64_t slab_bytes,
            std::uint64_t buckets, std::uint32_t max_pages)
      : tenant(tenant),
        geometry(geometry),
        store_(store),
        slab_bytes_(slab_bytes),
        buckets_(buckets),
        max_pages_(max_pages) {}
  ~SimClient() {
    for (auto& [slab, at] : slabs_) ::munmap(at.base, slab_bytes_);
    if (segment_ != nullptr) ::munmap(segment_, kSegmentBytes);
    if (directory_ != nullptr) ::munmap(directory_, directory_bytes(max_pages_));
    if (prefix_ != nullptr) ::munmap(prefix_, prefix_table_bytes(buckets_));
    if (mirror_ != nullptr) ::munmap(mirror_, mirror_bytes());
  }
  SimClient(const SimClient&) = delete;
  SimClient& operator=(const SimClient&) = delete;

  void connect(SessionId session) {
    id = session;
    const SessionMemory memory = store_.memory(id);
    segment_ = map_file(memory.segment, kSegmentBytes, true);
    directory_ = map_file(memory.directory_read_only, directory_bytes(max_pages_), false);
    prefix_ = map_file(memory.prefix_table_read_only, prefix_table_bytes(buckets_), false);
  }

  // --- slabs ---
  void on_notice(const SlabNotice& notice) {
    if (notice.map && slabs_.contains(raw(notice.slab))) {
      // A next daemon tells again what it does not know that this client knows.
    } else if (notice.map) {
      slabs_[raw(notice.slab)] = {map_file(notice.descriptor, slab_bytes_, notice.writable), notice.writable};
    } else {
      const auto found = slabs_.find(raw(notice.slab));
      if (found != slabs_.end()) {
        ::munmap(found->second.base, slab_bytes_);
        slabs_.erase(found);
      }
    }
    answers_.push_back({notice.slab, notice.map});
    if (answers_at_once) answer();
  }
  void answer() {
    while (!answers_.empty()) {
      const auto [slab, mapped] = answers_.front();
      answers_.pop_front();
      store_.acknowledge(id, slab, mapped);
    }
  }
  void forget_answers() { answers_.clear(); }  // its connection is gone
  bool answers_at_once = true, maps_slabs = true;
  bool stays_away = false;  // it does not come back to a next daemon for now
  std::size_t mapped_slabs() const { return slabs_.size(); }

  // --- rings ---
  Segment& segment() const { return *reinterpret_cast<Segment*>(segment_); }
  std::uint32_t magazine() const {
    const auto& m = segment().magazine;
    return static_cast<std::uint32_t>(m.produced.load() - m.consumed.load());
  }
  std::optional<MagazineItem> pop() {
    auto& m = segment().magazine;
    const std::uint64_t at = m.consumed.load();
    if (at == m.produced.load(std::memory_order_acquire)) return std::nullopt;
    const MagazineItem item = m.item[at % kMagazineSlots];
    m.consumed.store(at + 1, std::memory_order_release);
    return item;
  }
  bool send(const Command& c) {
    auto& r = segment().commands;
    const std::uint64_t at = r.produced.load();
    if (at - r.consumed.load(std::memory_order_acquire) >= kCommandSlots) return false;
    r.item[at % kCommandSlots] = c;
    r.produced.store(at + 1, std::memory_order_release);
    return true;
  }

  // --- steps ---
  std::uint64_t begin_step() {
    const std::uint64_t serial = ++last_step_;
    StepSlot& slot = segment().step[serial % kStepSlots];
    slot.epoch.store(header().epoch.load(std::memory_order_acquire), std::memory_order_relaxed);
    slot.begun.store(serial, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return serial;
  }
  void end_step(std::uint64_t serial) {
    segment().step[serial % kStepSlots].ended.store(serial, std::memory_order_release);
  }

  // --- pages ---
  const DirectoryHeader& header() const { return *reinterpret_cast<const DirectoryHeader*>(directory_); }
  Entry entry(PageId page) const {
    const auto* entries = reinterpret_cast<const DirectoryEntry*>(directory_ + sizeof(DirectoryHeader));
    return unpack_entry(entries[raw(page)].load(std::memory_order_acquire));
  }
  // What a kernel that starts now finds: in the mirror, where there is one.
  Entry kernel_entry(PageId page) {
    if (const int fd = store_.memory(id).mirror; mirror_ == nullptr && fd >= 0)
      mirror_ = map_file(fd, mirror_bytes(), false);
    if (mirror_ == nullptr) return entry(page);
    return unpack_entry(reinterpret_cast<const DirectoryEntry*>(mirror_)[raw(page)].load(std::memory_order_acquire));
  }
  std::byte* address(const Entry& e) const {
    const auto found = slabs_.find(static_cast<std::uint32_t>(e.offset_bytes / slab_bytes_));
    return found == slabs_.end() ? nullptr : found->second.base + e.offset_bytes % slab_bytes_;
  }
  void write(PageId page, std::uint16_t value) {
    const Entry e = kernel_entry(page);
    ASSERT_EQ(e.state, EntryState::open);
    ASSERT_EQ(e, entry(page));
    std::byte* at = address(e);
    ASSERT_NE(at, nullptr);
    const PageLayout layout = make_layout(geometry, Format::dense);
    for (std::uint64_t i = 0; i < layout.page_bytes; i += 2) std::memcpy(at + i, &value, 2);
  }
  // Where entry `e` points, every value must be `value`.
  ::testing::AssertionResult holds(const Entry& e, std::uint16_t value) const {
    if (e.state != EntryState::open && e.state != EntryState::sealed) {
      return ::testing::AssertionFailure() << "entry state " << static_cast<int>(e.state);
    }
    const std::byte* at = address(e);
    if (at == nullptr) return ::testing::AssertionFailure() << "its slab is not mapped";
    const PageLayout layout = make_layout(geometry, e.format);
    for (std::uint32_t l = 0; l < geometry.layers; ++l) {
      for (std::uint32_t h = 0; h < geometry.layer[l].kv_heads; ++h) {
        const std::byte* block = at + layout.layer[l].offset_bytes + h * layout.layer[l].head_bytes;
        if (!block_holds(block, layout.layer[l].format, geometry.layer[l].head_dim, value)) {
          std::uint16_t first;
          std::memcpy(&first, block, 2);
          return ::testing::AssertionFailure() << "wrong bytes in format " << static_cast<int>(e.format) << ": wanted "
                                               << value << ", first word " << first;
        }
      }
    }
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult holds(PageId page, std::uint16_t value) const { return holds(entry(page), value); }

  PrefixHit find(const Key& key) const {
    return find_prefix(*reinterpret_cast<const PrefixHeader*>(prefix_),
                       reinterpret_cast<const Bucket*>(prefix_ + sizeof(PrefixHeader)), key);
  }

  SessionId id{};
  TenantId tenant;
  ModelGeometry geometry;

 private:
  struct Mapped {
    std::byte* base;
    bool writable;
  };

  // The first word is `value` and each word equals the next.
  static bool all(const std::byte* at, std::uint32_t count, std::uint16_t value) {
    return std::memcmp(at, &value, 2) == 0 && std::memcmp(at, at + 2, 2 * (count - 1)) == 0;
  }
  static bool block_holds(const std::byte* b, Format f, std::uint32_t d, std::uint16_t value) {
    const BlockOffsets o = block_offsets(f, d);
    if (f == Format::dense) return all(b, kPageTokens * d * 2, value);
    return all(b + o.k_scale, d, 0) && all(b + o.k_mid, d, value) && all(b + o.v_scale, kPageTokens, 0) &&
           all(b + o.v_mid, kPageTokens, value);
  }

  std::uint64_t mirror_bytes() const { return std::uint64_t{max_pages_} * sizeof(DirectoryEntry); }

  Store& store_;
  std::uint64_t slab_bytes_, buckets_;
  std::uint32_t max_pages_;
  std::map<std::uint32_t, Mapped> slabs_;
  std::deque<std::pair<SlabId, bool>> answers_;
  std::byte* segment_ = nullptr;
  std::byte* directory_ = nullptr;
  std::byte* prefix_ = nullptr;
  std::byte* mirror_ = nullptr;
  std::uint64_t last_step_ = 0;
};

}  // namespace kvq::testing

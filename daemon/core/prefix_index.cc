// Linear probing as find_prefix reads it; how one bucket is written and read is in kvq/prefix_table.h.
#include "daemon/core/prefix_index.h"

#include <bit>

#include "kvq/result.h"

namespace kvq {
namespace {

constexpr std::size_t kNowhere = ~std::size_t{0};

std::uint64_t value_of(const PageRecord& record, PageId page) {
  return (std::uint64_t{record.generation} << 32) | raw(page);
}

}  // namespace

PrefixIndex::PrefixIndex(std::span<Bucket> buckets, PageTable& pages) : buckets_(buckets), pages_(pages) {
  KVQ_ASSERT(std::has_single_bit(buckets.size()));
}

void PrefixIndex::adopt() {
  size_ = 0;
  for (std::uint32_t i = 1; i < pages_.capacity(); ++i) {
    if ((pages_.record(PageId{i}).flags & kPageIndexed) != 0) ++size_;
  }
  rebuild();
}

PageId PrefixIndex::find(const Key& key) const {
  const std::uint64_t tag0 = key_word(key, 0), tag1 = key_word(key, 1), home = key_word(key, 2);
  for (std::uint32_t i = 0; i < kMaxProbe; ++i) {
    const Bucket& b = buckets_[(home + i) & mask()];
    const std::uint64_t value = b.value.load(std::memory_order_relaxed);
    if (value == 0) break;
    if (value == kTombstone || b.tag[0].load(std::memory_order_relaxed) != tag0 ||
        b.tag[1].load(std::memory_order_relaxed) != tag1) {
      continue;
    }
    const PageId page{static_cast<std::uint32_t>(value)};
    if (pages_.record(page).key == key) return page;
  }
  return kNullPage;
}

bool PrefixIndex::insert(PageId page, PageId parent) {
  if (find(pages_.record(page).key) != kNullPage || !put(page)) return false;
  pages_.set_indexed(page, parent);
  ++size_;
  return true;
}

bool PrefixIndex::put(PageId page) {
  const PageRecord& record = pages_.record(page);
  const std::uint64_t home = key_word(record.key, 2);
  for (std::uint32_t i = 0; i < kMaxProbe; ++i) {
    Bucket& b = buckets_[(home + i) & mask()];
    const std::uint64_t value = b.value.load(std::memory_order_relaxed);
    if (value != 0 && value != kTombstone) continue;
    if (value == kTombstone) --tombstones_;
    name_bucket<SharedMemory>(b, key_word(record.key, 0), key_word(record.key, 1), value_of(record, page));
    return true;
  }
  return false;
}

std::size_t PrefixIndex::bucket_of(PageId page) const {
  const PageRecord& record = pages_.record(page);
  const std::uint64_t home = key_word(record.key, 2), wanted = value_of(record, page);
  for (std::uint32_t i = 0; i < kMaxProbe; ++i) {
    const std::size_t at = (home + i) & mask();
    if (buckets_[at].value.load(std::memory_order_relaxed) == wanted) return at;
  }
  return kNowhere;
}

void PrefixIndex::erase(PageId page) {
  pages_.clear_indexed(page);
  --size_;
  const std::size_t at = bucket_of(page);
  if (at == kNowhere) return;  // a rebuild found no place for it within reach
  buckets_[at].value.store(kTombstone, std::memory_order_release);
  ++tombstones_;
  // A tombstone before an empty bucket ends no probe early: it can be empty itself.
  std::size_t i = at;
  while (buckets_[(i + 1) & mask()].value.load(std::memory_order_relaxed) == 0 &&
         buckets_[i].value.load(std::memory_order_relaxed) == kTombstone) {
    buckets_[i].value.store(0, std::memory_order_release);
    --tombstones_;
    i = (i - 1) & mask();
  }
  if (tombstones_ > buckets_.size() / 4) rebuild();
}

void PrefixIndex::rebuild() {
  for (Bucket& b : buckets_) b.value.store(0, std::memory_order_release);
  tombstones_ = 0;
  for (std::uint32_t i = 1; i < pages_.capacity(); ++i) {
    if ((pages_.record(PageId{i}).flags & kPageIndexed) != 0) put(PageId{i});
  }
}

}  // namespace kvq

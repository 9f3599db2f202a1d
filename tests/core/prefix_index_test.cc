// The prefix index: what clients find, tombstones and rebuilds, crowded neighbourhoods.
#include "daemon/core/prefix_index.h"

#include <gtest/gtest.h>

#include <cstring>
#include <iostream>
#include <map>
#include <random>

#include "tests/support/seed.h"

namespace kvq {
namespace {

struct Index {
  explicit Index(std::size_t buckets, std::size_t capacity = 256)
      : records(capacity), table(records, true), bucket(buckets), index(bucket, table) {
    header.buckets = buckets;
  }

  PageId add(const Key& key, PageId parent = kNullPage) {
    const PageId page = table.allocate({SlabId{0}, SlotIndex{0}, Format::dense}, 1, SessionId{1}, 1);
    table.move(page, PageState::open);
    table.set_seal(page, {.key = key});
    table.confirm_key(page);
    named = index.insert(page, parent);
    table.move(page, PageState::sealed);
    return page;
  }
  void remove(PageId page) {
    index.erase(page);
    table.move(page, PageState::retired);
    table.release_id(page);
  }
  PageId found_by_client(const Key& key) const { return find_prefix(header, bucket.data(), key).page; }

  std::vector<PageRecord> records;
  PageTable table;
  std::vector<Bucket> bucket;
  PrefixIndex index;
  PrefixHeader header{};
  bool named = false;
};

Key key_of(std::uint64_t n, std::uint64_t home) {
  Key key{};
  std::memcpy(key.data(), &n, 8);
  std::memcpy(key.data() + 16, &home, 8);
  return key;
}

TEST(PrefixIndex, ClientFindsWhatIsIndexedWithItsGeneration) {
  Index t(64);
  const PageId page = t.add(key_of(1, 5));
  EXPECT_TRUE(t.named);
  EXPECT_EQ(t.found_by_client(key_of(1, 5)), page);
  EXPECT_EQ(t.index.find(key_of(1, 5)), page);
  t.remove(page);
  EXPECT_EQ(t.found_by_client(key_of(1, 5)), kNullPage);
  const PageId again = t.add(key_of(1, 5));
  EXPECT_EQ(find_prefix(t.header, t.bucket.data(), key_of(1, 5)).generation, t.table.record(again).generation);
}

TEST(PrefixIndex, SecondPageWithTheSameContentIsNotNamed) {
  Index t(64);
  const PageId first = t.add(key_of(1, 5));
  t.add(key_of(1, 5));
  EXPECT_FALSE(t.named);
  EXPECT_EQ(t.index.find(key_of(1, 5)), first);
}

TEST(PrefixIndex, FullKeyDecidesWhereTagsCollide) {
  Index t(64);
  Key a = key_of(1, 5), b = a;
  b[31] = 1;  // same tag, same home
  const PageId first = t.add(a);
  EXPECT_EQ(t.index.find(b), kNullPage);
  const PageId second = t.add(b);
  EXPECT_TRUE(t.named);
  EXPECT_EQ(t.index.find(a), first);
  EXPECT_EQ(t.index.find(b), second);
}

TEST(PrefixIndex, CrowdedNeighbourhoodRefusesInsteadOfSearchingForEver) {
  Index t(256);
  for (std::uint32_t i = 0; i < kMaxProbe; ++i) {
    t.add(key_of(i + 1, 5));
    EXPECT_TRUE(t.named);
  }
  t.add(key_of(1000, 5));
  EXPECT_FALSE(t.named);
  t.add(key_of(1001, 5 + kMaxProbe));
  EXPECT_TRUE(t.named);
}

TEST(PrefixIndexDeathTest, ParentCannotLeaveBeforeItsChild) {
  Index t(64);
  const PageId parent = t.add(key_of(1, 5));
  t.add(key_of(2, 6), parent);
  EXPECT_DEATH(t.index.erase(parent), "assertion failed");
}

TEST(PrefixIndex, RandomInsertsAndErasesAgreeWithAMap) {
  const std::uint64_t seed = testing::test_seed(9);
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  Index t(128, 64);
  std::map<std::uint64_t, PageId> model;
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t n = random() % 80;
    const Key key = key_of(n + 1, n * 0x9e3779b97f4a7c15ULL);
    if (const auto known = model.find(n); known != model.end()) {
      t.remove(known->second);
      model.erase(known);
    } else if (t.table.free_pages() > 0) {
      const PageId page = t.add(key);
      ASSERT_TRUE(t.named);
      model[n] = page;
    }
    ASSERT_EQ(t.index.size(), model.size());
    ASSERT_LE(t.index.tombstones(), t.bucket.size() / 4 + 1);
    const std::uint64_t probe = random() % 80;
    const auto known = model.find(probe);
    ASSERT_EQ(t.found_by_client(key_of(probe + 1, probe * 0x9e3779b97f4a7c15ULL)),
              known == model.end() ? kNullPage : known->second);
  }
}

}  // namespace
}  // namespace kvq

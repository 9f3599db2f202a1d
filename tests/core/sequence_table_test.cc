// The sequence table: block tables over chunk borders, places given up, and what a hold adds.
#include "daemon/core/sequence_table.h"

#include <gtest/gtest.h>

namespace kvq {
namespace {

struct Table {
  Table(std::size_t sequences, std::size_t chunks) : records(sequences + 1), chunk(chunks), table(records, chunk) {}
  SequenceIndex make(std::uint32_t id) {
    const auto s = table.create(SessionId{1}, SequenceId{id}, TenantId{1}, kSequenceRunning, 1);
    EXPECT_TRUE(s);
    return *s;
  }
  std::vector<SequenceRecord> records;
  std::vector<TableChunk> chunk;
  SequenceTable table;
};

TEST(SequenceTable, BlockTablesCrossChunkBorders) {
  Table t(2, 8);
  const SequenceIndex a = t.make(1), b = t.make(2);
  for (std::uint32_t i = 0; i < 3 * kChunkPages; ++i) {
    ASSERT_TRUE(t.table.append(a, PageId{i + 1}));
    ASSERT_TRUE(t.table.append(b, PageId{1000 + i}));
  }
  for (std::uint32_t i = 0; i < 3 * kChunkPages; ++i) {
    EXPECT_EQ(t.table.page(a, i), PageId{i + 1});
    EXPECT_EQ(t.table.page(b, i), PageId{1000 + i});
  }
  EXPECT_EQ(t.table.free_chunks(), 2u);
  t.table.cut(a, kChunkPages + 1);
  EXPECT_EQ(t.table.free_chunks(), 3u);
  t.table.cut(a, kChunkPages);
  EXPECT_EQ(t.table.free_chunks(), 4u);
  t.table.cut(a, 0);
  EXPECT_EQ(t.table.free_chunks(), 5u);
  t.table.destroy(a);
  EXPECT_EQ(t.table.live(), 1u);
}

TEST(SequenceTable, FullTableSaysSo) {
  Table t(1, 1);
  const SequenceIndex a = t.make(1);
  EXPECT_FALSE(t.table.create(SessionId{1}, SequenceId{2}, TenantId{1}, 0, 1));
  for (std::uint32_t i = 0; i < kChunkPages; ++i) ASSERT_TRUE(t.table.append(a, PageId{i + 1}));
  EXPECT_FALSE(t.table.has_room(a));
  EXPECT_FALSE(t.table.append(a, PageId{99}));
  EXPECT_EQ(t.table.record(a).pages, kChunkPages);
}

TEST(SequenceTable, ChunksAloneTellTheBlockTable) {
  Table t(2, 8);
  const SequenceIndex a = t.make(1), b = t.make(2);
  for (std::uint32_t i = 0; i < 2 * kChunkPages; ++i) {
    ASSERT_TRUE(t.table.append(i % 2 ? a : b, PageId{i + 1}));
    ASSERT_TRUE(t.table.append(i % 2 ? b : a, PageId{i + 501}));
  }
  for (SequenceIndex s : {a, b}) {
    std::vector<PageId> pages(t.table.record(s).pages);
    for (const TableChunk& c : t.chunk) {
      if (c.owner != raw(s)) continue;
      for (std::uint32_t i = 0; i < kChunkPages && c.ordinal * kChunkPages + i < pages.size(); ++i) {
        pages[c.ordinal * kChunkPages + i] = c.page[i];
      }
    }
    for (std::uint32_t i = 0; i < pages.size(); ++i) EXPECT_EQ(pages[i], t.table.page(s, i));
  }
}

TEST(SequenceTable, PlacesBeforeTheKeptOnesHoldTheNullPage) {
  Table t(1, 4);
  const SequenceIndex a = t.make(1);
  for (std::uint32_t i = 0; i < 5; ++i) ASSERT_TRUE(t.table.append(a, PageId{i + 1}));
  t.table.forget_before(a, 3);
  t.table.forget_before(a, 2);  // already gone
  EXPECT_EQ(t.table.page(a, 2), kNullPage);
  EXPECT_EQ(t.table.page(a, 3), PageId{4});
  EXPECT_EQ(t.table.record(a).first_kept, 3u);
  t.table.cut(a, 1);
  EXPECT_EQ(t.table.record(a).first_kept, 1u);
}

TEST(SequenceTable, HoldFollowsWindowSinkAndFlags) {
  SequenceRecord s{};
  s.flags = kSequenceLive | kSequenceRunning;
  const WindowPolicy policy{.window_pages = 2, .sink_pages = 1};
  const auto protects = [&](std::uint32_t pages) {
    std::string out;
    for (std::uint32_t i = 0; i < pages; ++i) out += hold_of(s, i, pages, policy).protect ? 'x' : '.';
    return out;
  };
  EXPECT_EQ(protects(6), "x...xx");
  EXPECT_EQ(protects(3), "xxx");
  s.first_kept = 1;
  EXPECT_EQ(protects(6), "....xx");
  EXPECT_FALSE(hold_of(s, 0, 6, policy).reference);
  s.flags = kSequenceLive;  // parked
  EXPECT_EQ(protects(6), "......");
  EXPECT_TRUE(hold_of(s, 5, 6, policy).reference);
  EXPECT_FALSE(hold_of(s, 5, 6, policy).running);
  s.flags = kSequenceLive | kSequenceFloorDense;
  EXPECT_EQ(protects(6), ".xxxxx");
  EXPECT_FALSE(hold_of(s, 6, 6, policy).reference);
}

}  // namespace
}  // namespace kvq

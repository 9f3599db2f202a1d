// The page table: legal and illegal transitions, holds, and the order of victims.
#include "daemon/core/page_table.h"

#include <gtest/gtest.h>

namespace kvq {
namespace {

constexpr PageState kAll[] = {PageState::free,   PageState::credit,      PageState::open,   PageState::sealing,
                              PageState::sealed, PageState::transcoding, PageState::retired,
                              PageState::lost};

struct Table {
  explicit Table(std::size_t capacity = 8, bool quantizable = true) : records(capacity), table(records, quantizable) {}

  PageId make(PageState state, std::uint64_t now_ms = 1) {
    const PageId page = table.allocate({SlabId{0}, SlotIndex{0}, Format::dense}, 1, SessionId{1}, now_ms);
    const PageState path[] = {PageState::open, PageState::sealing, PageState::sealed, PageState::transcoding};
    if (state == PageState::credit) return page;
    if (state == PageState::retired) {
      table.move(page, state);
      return page;
    }
    for (PageState s : path) {
      if (s == PageState::transcoding && state == PageState::lost) s = state;
      table.move(page, s);
      if (s == state) break;
    }
    return page;
  }

  // A sealed page that the prefix index names.
  PageId cached(PageId parent, std::uint64_t now_ms) {
    const PageId page = make(PageState::open, now_ms);
    table.set_seal(page, {});
    table.confirm_key(page);
    table.set_indexed(page, parent);
    table.move(page, PageState::sealed);
    return page;
  }

  std::vector<PageId> victims(VictimList list) const {
    std::vector<PageId> out;
    for (PageId p = table.first_victim(list); p != kNullPage; p = table.next_victim(list, p)) out.push_back(p);
    return out;
  }

  std::vector<PageRecord> records;
  PageTable table;
};

constexpr Hold kRunning{.reference = true, .running = true};
constexpr Hold kProtected{.reference = true, .running = true, .protect = true};
constexpr Hold kParked{.reference = true};

bool legal(PageState from, PageState to) {
  switch (from) {
    case PageState::free:
      return false;  // by allocate() alone
    case PageState::credit:
      return to == PageState::open || to == PageState::retired;
    case PageState::open:
      return to == PageState::sealing || to == PageState::retired;
    case PageState::sealing:
      return to == PageState::sealed || to == PageState::retired;
    case PageState::sealed:
      return to == PageState::transcoding || to == PageState::retired || to == PageState::lost;
    case PageState::transcoding:
      return to == PageState::sealed || to == PageState::retired;
    case PageState::retired:
      return to == PageState::free;
    case PageState::lost:
      return to == PageState::retired;
  }
  return false;
}

TEST(PageTableDeathTest, EveryIllegalTransitionAssertsAndEveryLegalOnePasses) {
  for (PageState from : kAll) {
    if (from == PageState::free) continue;
    for (PageState to : kAll) {
      Table t;
      const PageId page = t.make(from);
      if (legal(from, to)) {
        t.table.move(page, to);
        EXPECT_EQ(t.table.record(page).state, to);
      } else {
        EXPECT_DEATH(t.table.move(page, to), "assertion failed") << name(from) << " to " << name(to);
      }
    }
  }
}

TEST(PageTableDeathTest, HeldPageCannotRetire) {
  Table t;
  const PageId page = t.make(PageState::sealed);
  t.table.change_hold(page, {}, kParked);
  EXPECT_DEATH(t.table.move(page, PageState::retired), "assertion failed");
}

TEST(PageTableDeathTest, HoldsNeverGoBelowZero) {
  Table t;
  const PageId page = t.make(PageState::sealed);
  EXPECT_DEATH(t.table.change_hold(page, kParked, {}), "assertion failed");
}

TEST(PageTable, ReusedIdHasANewGenerationAndNothingOfItsPast) {
  Table t(2);
  const PageId page = t.cached(kNullPage, 5);
  t.table.clear_indexed(page);
  t.table.move(page, PageState::retired);
  t.table.release_id(page);
  EXPECT_EQ(t.table.free_pages(), 1u);
  const PageId again = t.make(PageState::credit, 9);
  EXPECT_EQ(again, page);
  EXPECT_EQ(t.table.record(again).generation, 1);
  EXPECT_EQ(t.table.record(again).flags, 0);
}

TEST(PageTable, SealedDensePageIsAVictimUnlessSomethingProtectsIt) {
  Table t;
  const PageId page = t.make(PageState::sealed);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::idle);
  t.table.change_hold(page, {}, kProtected);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::none);
  t.table.change_hold(page, kProtected, kRunning);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::running);
  t.table.change_hold(page, {}, kProtected);  // a second sequence
  EXPECT_EQ(t.table.quantize_list(page), VictimList::none);
  t.table.change_hold(page, kProtected, {});
  t.table.change_hold(page, kRunning, kParked);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::idle);
  t.table.set_keeps_dense(page);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::none);
}

TEST(PageTable, PagesOfAFloorTenantAreNeverVictims) {
  Table t(8, false);
  EXPECT_EQ(t.table.quantize_list(t.make(PageState::sealed)), VictimList::none);
}

TEST(PageTable, VictimsComeInOrderOfLastUse) {
  Table t;
  const PageId late = t.make(PageState::sealed, 30), early = t.make(PageState::sealed, 10),
               mid = t.make(PageState::sealed, 20);
  EXPECT_EQ(t.victims(VictimList::idle), (std::vector<PageId>{early, mid, late}));
  t.table.touch(early, 40);
  EXPECT_EQ(t.victims(VictimList::idle), (std::vector<PageId>{mid, late, early}));
  t.table.touch(early, 5);  // time never goes back
  EXPECT_EQ(t.victims(VictimList::idle), (std::vector<PageId>{mid, late, early}));
}

TEST(PageTable, ParentIsNoVictimBeforeItsChildren) {
  Table t;
  const PageId root = t.cached(kNullPage, 10), leaf = t.cached(root, 10);
  EXPECT_EQ(t.victims(VictimList::cached), std::vector<PageId>{leaf});
  t.table.clear_indexed(leaf);
  EXPECT_EQ(t.victims(VictimList::cached), std::vector<PageId>{root});
  t.table.change_hold(root, {}, kParked);
  EXPECT_TRUE(t.victims(VictimList::cached).empty());
}

TEST(PageTable, CachedPagesAreThoseThatOnlyTheIndexHolds) {
  Table t;
  const PageId page = t.cached(kNullPage, 1);
  EXPECT_EQ(t.table.cached_pages(), 1u);
  t.table.move(page, PageState::transcoding);
  EXPECT_EQ(t.table.cached_pages(), 1u);
  t.table.change_hold(page, {}, kRunning);
  EXPECT_EQ(t.table.cached_pages(), 0u);
}

TEST(PageTable, ThreeFailuresInARowLeaveAPageAlone) {
  Table t;
  const PageId page = t.make(PageState::sealed);
  t.table.count_failure(page, true);
  t.table.count_failure(page, true);
  t.table.count_failure(page, false);
  t.table.count_failure(page, true);
  t.table.count_failure(page, true);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::idle);
  t.table.count_failure(page, true);
  EXPECT_EQ(t.table.quantize_list(page), VictimList::none);
}

}  // namespace
}  // namespace kvq

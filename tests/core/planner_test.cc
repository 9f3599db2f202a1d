// Pressure and plan, as tables: hysteresis, bounds, order of remedies, fairness.
#include "daemon/core/planner.h"

#include <gtest/gtest.h>

#include "daemon/core/pressure.h"

namespace kvq {
namespace {

TEST(Pressure, LevelStartsAtItsWatermarkAndEndsBelowIt) {
  const Watermarks w{.quantize_at = 0.6, .evict_at = 0.8, .refuse_at = 0.9, .relief = 0.05};
  struct Case {
    PressureLevel before;
    double usage;
    PressureLevel after;
  };
  using enum PressureLevel;
  for (const Case& c :
       {Case{calm, 0.59, calm}, Case{calm, 0.6, quantize}, Case{quantize, 0.56, quantize}, Case{quantize, 0.54, calm},
        Case{calm, 0.85, evict}, Case{evict, 0.76, evict}, Case{evict, 0.74, quantize}, Case{refuse, 0.86, refuse},
        Case{refuse, 0.84, evict}, Case{refuse, 0.2, calm}, Case{calm, 1.0, refuse}}) {
    EXPECT_EQ(next_level(c.before, c.usage, w), c.after) << name(c.before) << " at " << c.usage;
  }
}

TEST(Pressure, WatermarksMustRise) {
  EXPECT_TRUE(valid(Watermarks{}));
  EXPECT_FALSE(valid(Watermarks{.quantize_at = 0.9, .evict_at = 0.8}));
  EXPECT_FALSE(valid(Watermarks{.relief = 0}));
  EXPECT_FALSE(valid(Watermarks{.quantize_at = 0.05, .relief = 0.05}));
  EXPECT_FALSE(valid(Watermarks{.refuse_at = 1.01}));
}

std::vector<Victim> victims(std::uint32_t first, std::uint32_t count, std::uint64_t gain = 100) {
  std::vector<Victim> out;
  for (std::uint32_t i = 0; i < count; ++i) out.push_back({PageId{first + i}, gain});
  return out;
}

Snapshot base() {
  Snapshot s;
  s.max_actions = 16;
  s.slab_bytes = 1000;
  s.keep_empty_ms = 50;
  return s;
}

std::vector<std::uint32_t> pages(const std::vector<Action>& actions, ActionKind kind) {
  std::vector<std::uint32_t> out;
  for (const Action& a : actions) {
    if (a.kind == kind) out.push_back(raw(a.page));
  }
  return out;
}

TEST(Planner, CalmPlansNothing) {
  Snapshot s = base();
  s.tenants.push_back({.id = TenantId{1}, .idle = victims(1, 5), .running = victims(10, 5), .cached = victims(20, 5)});
  EXPECT_TRUE(plan(s).empty());
}

TEST(Planner, TakesNoMoreThanNeeded) {
  Snapshot s = base();
  s.need.quantize_bytes = 250;
  s.tenants.push_back({.id = TenantId{1}, .idle = victims(1, 5), .running = victims(10, 5)});
  EXPECT_EQ(pages(plan(s), ActionKind::transcode), (std::vector<std::uint32_t>{1, 2, 3}));
}

TEST(Planner, RemediesComeInOrder) {
  Snapshot s = base();
  s.need = {.quantize_bytes = 1800, .evict_bytes = 1800};
  TenantView t{.id = TenantId{1}, .idle = victims(1, 2), .running = victims(10, 2), .cached = victims(20, 9)};
  t.merges.push_back({SlabId{7}, {PageId{30}, PageId{31}}, 2});
  s.tenants.push_back(t);
  const auto actions = plan(s);
  const std::vector<ActionKind> kinds = [&] {
    std::vector<ActionKind> out;
    for (const Action& a : actions) out.push_back(a.kind);
    return out;
  }();
  using enum ActionKind;
  EXPECT_EQ(kinds, (std::vector<ActionKind>{transcode, transcode, compact, compact, transcode, transcode, drop, drop,
                                            drop, drop}));
}

TEST(Planner, QuantizeLevelNeverDrops) {
  Snapshot s = base();
  s.need.quantize_bytes = 1'000'000;
  s.tenants.push_back({.id = TenantId{1}, .cached = victims(20, 5)});
  EXPECT_TRUE(plan(s).empty());
}

TEST(Planner, PageIdsComeFromDropsAloneAndBeforeOtherRemedies) {
  Snapshot s = base();
  s.tenants.push_back({.id = TenantId{1},
                       .need = {.quantize_bytes = 1000},
                       .need_ids = 3,
                       .idle = victims(20, 5),
                       .cached = victims(20, 5)});
  const auto actions = plan(s);
  EXPECT_EQ(pages(actions, ActionKind::drop), (std::vector<std::uint32_t>{20, 21, 22}));
  EXPECT_EQ(pages(actions, ActionKind::transcode), (std::vector<std::uint32_t>{23, 24}));
}

TEST(Planner, PlanIsBounded) {
  Snapshot s = base();
  s.max_actions = 4;
  s.need = {.quantize_bytes = 1'000'000, .evict_bytes = 1'000'000};
  TenantView t{.id = TenantId{1}, .idle = victims(1, 3), .running = victims(10, 9), .cached = victims(20, 9)};
  s.tenants.push_back(t);
  EXPECT_EQ(plan(s).size(), 4u);
}

TEST(Planner, TenantFurthestOverItsSharePays) {
  Snapshot s = base();
  s.need.quantize_bytes = 250;
  s.tenants.push_back({.id = TenantId{1}, .slab_bytes = 5000, .share = 1, .idle = victims(1, 5)});
  s.tenants.push_back({.id = TenantId{2}, .slab_bytes = 8000, .share = 2, .idle = victims(1, 5)});
  for (const Action& a : plan(s)) EXPECT_EQ(a.tenant, TenantId{1});
  s.tenants[1].share = 1;
  for (const Action& a : plan(s)) EXPECT_EQ(a.tenant, TenantId{2});
}

TEST(Planner, TenantOverItsOwnQuotaPaysItself) {
  Snapshot s = base();
  s.tenants.push_back({.id = TenantId{1}, .slab_bytes = 9000, .idle = victims(1, 5)});
  s.tenants.push_back({.id = TenantId{2}, .slab_bytes = 1000, .need = {.quantize_bytes = 150}, .idle = victims(1, 5)});
  const auto actions = plan(s);
  ASSERT_EQ(actions.size(), 2u);
  for (const Action& a : actions) EXPECT_EQ(a.tenant, TenantId{2});
}

TEST(Planner, MergeNeedsRoomElsewhereAndUntouchedPages) {
  Snapshot s = base();
  s.need.quantize_bytes = 5000;
  TenantView t{.id = TenantId{1}, .idle = victims(30, 1)};
  t.merges.push_back({SlabId{7}, {PageId{30}, PageId{31}}, 4});  // page 30 is being quantized
  t.merges.push_back({SlabId{8}, {PageId{40}, PageId{41}}, 1});  // no room
  t.merges.push_back({SlabId{9}, {PageId{50}}, 1});
  s.tenants.push_back(t);
  EXPECT_EQ(pages(plan(s), ActionKind::compact), std::vector<std::uint32_t>{50});
}

TEST(Planner, EmptySlabIsKeptAWhileInCalmAndReturnedAtOnceWhenShort) {
  Snapshot s = base();
  TenantView t{.id = TenantId{1}};
  t.empty = {{SlabId{3}, true, 10}, {SlabId{4}, true, 60}, {SlabId{5}, false, 60}};
  s.tenants.push_back(t);
  EXPECT_EQ(plan(s), (std::vector<Action>{{ActionKind::return_slab, TenantId{1}, kNullPage, SlabId{4}}}));
  s.short_of_slabs = true;
  EXPECT_EQ(plan(s).size(), 2u);
}

}  // namespace
}  // namespace kvq

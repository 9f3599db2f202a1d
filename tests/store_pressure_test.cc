// What the store does when memory gets short: whom it quantizes, what it drops, whom it refuses, and in which order.
#include <gtest/gtest.h>

#include <random>

#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

std::uint32_t count(SimClient& c, const std::vector<PageId>& pages, Format format) {
  std::uint32_t n = 0;
  for (PageId p : pages) n += c.entry(p).state == EntryState::sealed && c.entry(p).format == format ? 1 : 0;
  return n;
}

TEST(StorePressure, IdlePagesAreQuantizedBeforeRunningOnes) {
  StoreConfig config = StoreNode::small();
  config.actions_per_tick = 3;
  StoreNode node(9, config);  // 8 usable; quantize at 0.6
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto idle = s.grow(1, 1, 8);
  s.park(1);
  const auto running = s.grow(2, 2, 12);  // 20 dense pages: 5 slabs of 8
  ASSERT_EQ(running.size(), 12u);
  for (int i = 0; i < 20; ++i) {
    node.tick();
    if (count(*client, running, Format::int4) > 0) {
      EXPECT_EQ(count(*client, idle, Format::int4), 8u);
    }
  }
  EXPECT_EQ(count(*client, idle, Format::int4), 8u);
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_TRUE(client->holds(idle[i], value_of(chain_key(1, i))));
}

// A device with a pace keeps it unless somebody waits for memory.
TEST(StorePressure, TheDeviceIsToldForAsLongAsSomebodyWaitsForMemory) {
  StoreNode node(11);  // 10 usable, of 4 dense pages each; quantize at 0.6
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 1, 28).size(), 28u);
  s.park(1);
  node.device.hold_jobs = true;
  node.ticks(3);
  ASSERT_GT(node.device.in_flight(), 0u);
  EXPECT_FALSE(node.device.urgent) << "memory is short and nobody waits";
  EXPECT_FALSE(node.store->request_credits(client->id, 16));
  node.ticks(2);
  EXPECT_TRUE(node.device.urgent) << "for what was submitted before, too";
  node.device.hold_jobs = false;
  EXPECT_TRUE(s.want(16));
  node.ticks(5, 50);
  EXPECT_FALSE(node.device.urgent);
}

TEST(StorePressure, TheDeviceIsToldOfALevelThatRefusesAndOfPageIdsThatAreMissing) {
  StoreConfig refusing = StoreNode::small(), few_ids = StoreNode::small();
  refusing.watermarks = {.quantize_at = 0.3, .evict_at = 0.35, .refuse_at = 0.4, .relief = 0.05};
  few_ids.max_pages = 32;
  struct Case {
    const char* what;
    StoreConfig config;
    std::uint64_t quota_slabs;
    std::uint32_t slabs, pages, wish;
  };
  for (const Case& c : {Case{"the arena refuses", refusing, 0, 11, 28, 0}, Case{"a quota does", refusing, 5, 24, 16, 0},
                        Case{"page ids are few", few_ids, 0, 24, 20, 16}}) {
    StoreNode node(c.slabs, c.config);
    auto client = node.client(node.tenant("a", c.quota_slabs));
    SimServer s{node, *client};
    node.device.hold_jobs = true;
    EXPECT_FALSE(node.device.urgent) << c.what;
    ASSERT_EQ(s.grow(1, 1, c.pages).size(), c.pages) << c.what;
    if (c.wish > 0) {
      node.ticks(3);
      EXPECT_FALSE(node.device.urgent) << c.what;
      EXPECT_FALSE(node.store->request_credits(client->id, c.wish)) << c.what;
    }
    node.ticks(3);
    EXPECT_TRUE(node.device.urgent) << c.what;
  }
}

TEST(StorePressure, WindowAndSinksOfARunningSequenceStayDense) {
  StoreNode node(5);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 1, 12);
  ASSERT_EQ(pages.size(), 12u);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(20);
  const std::uint32_t window = node.config.window_pages;
  for (std::uint32_t i = 0; i < 12; ++i) {
    const bool stays = i < node.config.sink_pages || i + window >= 12;
    EXPECT_EQ(client->entry(pages[i]).format, stays ? Format::dense : Format::int4) << i;
  }
  s.park(1);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(5);
  EXPECT_EQ(count(*client, pages, Format::int4), 12u);
}

// What the benchmark of the pace lives on: a source of pages at any rate, which moves nothing else.
TEST(StorePressure, SequencesWithinTheWindowTurnInt4OneByOneAsTheyAreParked) {
  StoreConfig config = StoreNode::small();
  config.window_pages = 4;
  config.watermarks = {.quantize_at = 0.02, .evict_at = 0.97, .refuse_at = 0.99, .relief = 0.01};
  StoreNode node(24, config);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  std::vector<std::vector<PageId>> pages;
  for (std::uint32_t i = 1; i <= 12; ++i) pages.push_back(s.grow(i, i, 4));
  node.ticks(5);
  for (const auto& p : pages) EXPECT_EQ(count(*client, p, Format::dense), 4u);
  for (std::uint32_t parked = 1; parked <= 12; ++parked) {
    s.park(parked);
    node.ticks(4);
    for (std::uint32_t i = 0; i < 12; ++i) {
      EXPECT_EQ(count(*client, pages[i], Format::int4), i < parked ? 4u : 0u) << i << " of " << parked;
    }
  }
  EXPECT_EQ(node.store->status().counts.all_transcodes(), 48u) << "nothing was moved for it";
  EXPECT_FALSE(node.device.urgent);
}

TEST(StorePressure, PageSharedByTwoSequencesIsProtectedByEither) {
  StoreNode node(6);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 1, 8);
  s.act(CommandKind::fork, 2, 5, 1);  // pages 3 and 4 are its window
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(5);
  for (std::uint32_t i = 0; i < 8; ++i) {
    const bool stays = i == 0 || i == 3 || i == 4 || i >= 6;
    EXPECT_EQ(client->entry(pages[i]).format, stays ? Format::dense : Format::int4) << i;
  }
}

TEST(StorePressure, FormatFloorOfSequenceSessionAndTenantHolds) {
  StoreNode node(12);
  const TenantId plain = node.tenant("plain"), strict = node.tenant("strict", 0, 1.0, true);
  auto a = node.client(plain), b = node.client(plain, 0, 1, true), c = node.client(strict);
  SimServer one{node, *a}, two{node, *b}, three{node, *c};
  const auto floor_sequence = one.grow(1, 1, 5, kFormatFloorDense), free_sequence = one.grow(2, 2, 5);
  const auto floor_session = two.grow(1, 3, 5), floor_tenant = three.grow(1, 4, 5);
  one.park(1), one.park(2), two.park(1), three.park(1);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(6);
  EXPECT_EQ(count(*a, floor_sequence, Format::int4), 0u);
  EXPECT_EQ(count(*a, free_sequence, Format::int4), 5u);
  EXPECT_EQ(count(*b, floor_session, Format::int4), 0u);
  EXPECT_EQ(count(*c, floor_tenant, Format::int4), 0u);
  // A dense-only sequence does not take what is quantized already.
  EXPECT_EQ(one.attach(7, 2, 5, true).error().code, Errc::stale_id);
  EXPECT_TRUE(one.attach(7, 2, 5, false));
}

TEST(StorePressure, EightTimesTheArenaPassesThroughAndOldestContentGoesFirst) {
  StoreNode node(6);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  for (std::uint32_t i = 1; i <= 40; ++i) {
    ASSERT_EQ(s.grow(i, i, 4).size(), 4u) << "sequence " << i;
    s.release(i);
    node.tick();
  }
  const StoreStatus status = node.store->status();
  EXPECT_GT(status.counts.drops, 0u);
  EXPECT_GT(status.counts.all_transcodes(), 0u);
  EXPECT_EQ(client->find(chain_key(1, 0)).page, kNullPage);
  EXPECT_NE(client->find(chain_key(40, 3)).page, kNullPage);
  node.store->check_invariants();
}

TEST(StorePressure, LeavesAreDroppedBeforeTheirParents) {
  StoreNode node(5);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  for (std::uint32_t i = 1; i <= 20; ++i) {
    ASSERT_EQ(s.grow(i, i, 5).size(), 5u);
    s.release(i);
    node.ticks(2);
    for (std::uint32_t chain = 1; chain <= i; ++chain) {
      bool gone = false;
      for (std::uint32_t p = 0; p < 5; ++p) {
        const bool here = client->find(chain_key(chain, p)).page != kNullPage;
        EXPECT_FALSE(here && gone) << "chain " << chain << " page " << p << " outlived its parent";
        gone = !here;
      }
    }
  }
}

TEST(StorePressure, SmallArenaServesAsLongAsAnythingCanBeMadeSmaller) {
  StoreNode node(3);  // 2 usable slabs: 8 dense pages at most, or fewer and some int4
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 1, 7).size(), 7u);
  s.park(1);
  ASSERT_EQ(s.grow(2, 2, 4).size(), 4u);
  s.park(2);
  ASSERT_EQ(s.grow(3, 3, 4).size(), 4u);
  for (std::uint32_t i = 0; i < 7; ++i) {
    EXPECT_TRUE(client->holds(client->find(chain_key(1, i)).page, value_of(chain_key(1, i))));
  }
}

TEST(StorePressure, RefusalIsTypedAndNothingIsLost) {
  StoreNode node(4, [] {
    StoreConfig c = StoreNode::small();
    c.window_pages = 100;  // everything that runs stays dense
    return c;
  }());
  const TenantId tenant = node.tenant("a", 2);
  auto client = node.client(tenant);
  SimServer s{node, *client};
  EXPECT_EQ(node.store->request_credits(client->id, 9).error().code, Errc::over_quota);
  EXPECT_EQ(node.store->request_credits(client->id, 5000).error().code, Errc::limit_reached);
  const auto pages = s.grow(1, 1, 8);
  ASSERT_EQ(pages.size(), 8u);
  EXPECT_FALSE(s.want(1));
  EXPECT_EQ(node.store->request_credits(client->id, 1).error().code, Errc::no_memory);
  EXPECT_LT(node.store->status().level, PressureLevel::refuse);  // the quota is short, not the arena
  node.store->withdraw_credits(client->id);
  EXPECT_EQ(node.store->status().tenants[0].level, PressureLevel::refuse);
  for (std::uint32_t i = 0; i < 8; ++i) EXPECT_TRUE(client->holds(pages[i], value_of(chain_key(1, i))));
  s.release(1);
  EXPECT_TRUE(s.want(1));
}

TEST(StorePressure, OneTenantsQuotaIsNotAnothers) {
  StoreNode node(9);
  const TenantId small = node.tenant("small", 2), big = node.tenant("big", 4);
  auto a = node.client(small), b = node.client(big);
  SimServer one{node, *a}, two{node, *b};
  for (std::uint32_t i = 1; i <= 10; ++i) {
    ASSERT_EQ(one.grow(i, i, 4).size(), 4u);
    one.release(i);
    node.tick();
    EXPECT_LE(node.store->status().tenants[0].slab_bytes,
              3 * StoreNode::kSlabBytes);  // one more only to transcode into
  }
  ASSERT_EQ(two.grow(1, 1, 12).size(), 12u);
}

TEST(StorePressure, TenantFurthestOverItsSharePaysFirst) {
  StoreNode node(11);
  const TenantId heavy = node.tenant("heavy", 0, 1.0), light = node.tenant("light", 0, 4.0);
  auto a = node.client(heavy), b = node.client(light);
  SimServer one{node, *a}, two{node, *b};
  Watermarks w;
  w.quantize_at = 0.95;
  w.evict_at = w.refuse_at = 1.0;
  ASSERT_TRUE(node.store->set_watermarks(w));
  const auto mine = one.grow(1, 1, 20), theirs = two.grow(1, 2, 16);
  ASSERT_EQ(theirs.size(), 16u);
  one.park(1), two.park(1);
  w.quantize_at = 0.80;
  ASSERT_TRUE(node.store->set_watermarks(w));
  node.ticks(3);
  EXPECT_GT(count(*a, mine, Format::int4), 0u);
  EXPECT_EQ(count(*b, theirs, Format::int4), 0u);
}

TEST(StorePressure, LevelEndsOnlyBelowItsWatermark) {
  StoreNode node(11);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_TRUE(s.want(4 * 6));
  node.tick();
  EXPECT_EQ(node.store->status().level, PressureLevel::quantize);
  const std::size_t lines = node.lines.size();
  node.ticks(20);
  for (std::size_t i = lines; i < node.lines.size(); ++i) {
    EXPECT_EQ(node.lines[i].find("event=pressure"), std::string::npos) << node.lines[i];
  }
}

TEST(StorePressure, CompactionEmptiesPartFullSlabs) {
  StoreNode node(9);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  for (std::uint32_t i = 1; i <= 16; ++i) ASSERT_EQ(s.grow(i, i, 1, kFormatFloorDense).size(), 1u);
  for (std::uint32_t i = 1; i <= 16; ++i) {
    if (i % 4 != 0) s.act(CommandKind::truncate, i, 0);  // 12 cached, 4 held, one in each slab
  }
  // The cached ones can be quantized, the held ones only moved together.
  ASSERT_TRUE(s.want(16));
  for (std::uint32_t i = 4; i <= 16; i += 4) {
    const PageId page = client->find(chain_key(i, 0)).page;
    EXPECT_TRUE(client->holds(page, value_of(chain_key(i, 0))));
    EXPECT_EQ(client->entry(page).format, Format::dense);
  }
  node.store->check_invariants();
}

TEST(StorePressure, FailedTranscodeLeavesThePageAndSaysWhy) {
  StoreNode node(6);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 1, 3);
  s.park(1);
  node.device.faults.fail_for_good = 1;
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(5);
  EXPECT_EQ(node.store->status().counts.transcode_failures, 3u);
  EXPECT_FALSE(node.store->pages(tenant, 1, node.now_ms)[0].stays_dense.empty());
  node.device.faults.fail_for_good = 0;
  EXPECT_EQ(node.store->quantize(std::nullopt, 0, false, node.now_ms).pages, 0u);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(client->holds(pages[i], value_of(chain_key(1, i))));
}

TEST(StorePressure, DeathsOfTheWorkerAreNotHeldAgainstThePage) {
  StoreNode node(6);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 1, 3);
  s.park(1);
  node.device.faults.fail_lost = 1;
  for (int death = 0; death < 20; ++death) {
    node.store->quantize(std::nullopt, 0, false, node.now_ms);
    node.ticks(5);
  }
  EXPECT_EQ(node.store->status().counts.transcode_failures, 60u);
  node.device.faults.fail_lost = 0;
  EXPECT_EQ(node.store->quantize(std::nullopt, 0, false, node.now_ms).pages, 3u);
  node.ticks(5);
  EXPECT_EQ(client->entry(pages[1]).format, Format::int4);
}

TEST(StorePressure, PageReleasedInMidTranscodeGoesWhenTheJobEnds) {
  StoreNode node(6);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_TRUE(s.want(1));
  s.open(1);
  const MagazineItem item = s.take(1, 0, chain_key(1, 0));
  s.seal(1, 0, item, chain_key(1, 0), 0, kPrivate);
  s.park(1);
  node.device.hold_jobs = true;
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(3);
  ASSERT_EQ(node.store->status().transcodes_in_flight, 1u);
  s.release(1);
  node.ticks(3);
  EXPECT_EQ(client->entry(item.page).state, EntryState::sealed);  // the job still reads its slot
  node.device.hold_jobs = false;
  node.ticks(3);
  EXPECT_EQ(client->entry(item.page).state, EntryState::free);
  node.store->check_invariants();
}

TEST(StorePressure, CacheThatUsesUpAllPageIdsGivesWay) {
  StoreConfig config = StoreNode::small();
  config.max_pages = 33;
  StoreNode node(64, config);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  for (std::uint32_t i = 1; i <= 12; ++i) {
    ASSERT_EQ(s.grow(i, i, 8).size(), 8u) << "sequence " << i;
    s.release(i);
  }
  EXPECT_EQ(node.store->status().level, PressureLevel::calm);
  EXPECT_GE(node.store->status().counts.drops, 64u);
}

TEST(StorePressure, DryRunChangesNothing) {
  StoreNode node(6);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 1, 3);
  s.release(1);
  node.now_ms += 100;
  EXPECT_EQ(node.store->quantize(std::nullopt, 1000, true, node.now_ms).pages, 0u);
  const QuantizeReport report = node.store->quantize(std::nullopt, 50, true, node.now_ms);
  EXPECT_EQ(report.pages, 3u);
  EXPECT_EQ(report.bytes_before, 3 * 16384u);
  EXPECT_EQ(report.bytes_after, 3 * 4608u);
  node.ticks(3);
  EXPECT_EQ(count(*client, pages, Format::dense), 3u);
}

TEST(StorePressure, UnusedCreditsAreAskedBack) {
  StoreNode node(5);
  const TenantId tenant = node.tenant("a");
  auto idle = node.client(tenant, 3), busy = node.client(tenant);
  node.ticks(2);
  ASSERT_EQ(idle->magazine(), 3u);
  SimServer s{node, *busy};
  ASSERT_TRUE(s.want(13));
  node.tick();
  EXPECT_EQ(idle->segment().daemon.credits_wanted_back.load(), 3u);
  EXPECT_EQ(idle->segment().daemon.pressure_level.load(), static_cast<std::uint32_t>(PressureLevel::refuse));
}

TEST(StorePressure, SessionWhoseStepNeverEndsGetsNoNewPagesPastTheDeadline) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto stuck = node.client(tenant), other = node.client(tenant);
  SimServer s{node, *stuck}, o{node, *other};
  ASSERT_TRUE(s.want(1));
  s.open(1);
  s.take(1, 0, chain_key(1, 0));
  s.drain();
  stuck->begin_step();
  s.release(1);
  node.ticks(3);
  EXPECT_TRUE(s.want(1));
  node.tick(node.config.step_deadline_ms + 1);
  EXPECT_FALSE(s.want(2, 3));
  EXPECT_TRUE(o.want(2));
}

}  // namespace
}  // namespace kvq::testing

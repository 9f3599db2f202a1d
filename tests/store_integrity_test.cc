// Wrong bytes in sealed pages: found by a pass, by a transcode and by the next daemon, and read by nobody after that.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

// Flips one bit at the page's place, as a fault of the machine would.
void damage(StoreNode& node, const SimClient& client, PageId page, std::uint64_t byte = 100) {
  const Entry e = client.entry(page);
  const auto slab = static_cast<std::uint32_t>(e.offset_bytes / StoreNode::kSlabBytes);
  std::byte* at = map_file(node.device.descriptor(SlabId{slab}, true), StoreNode::kSlabBytes, true);
  at[e.offset_bytes % StoreNode::kSlabBytes + byte] ^= std::byte{4};
  ::munmap(at, StoreNode::kSlabBytes);
}

VerifyStatus verified(StoreNode& node, std::optional<TenantId> tenant = std::nullopt) {
  node.store->verify(tenant);
  for (int i = 0; i < 100 && node.store->status().verify.running; ++i) node.tick();
  EXPECT_FALSE(node.store->status().verify.running);
  node.store->check_invariants();
  return node.store->status().verify;
}

TEST(StoreIntegrity, PassOverGoodPagesFindsNothing) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 9);
  node.ticks(5);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(5);
  const VerifyStatus status = verified(node);
  EXPECT_EQ(status.pages_total, 9u);
  EXPECT_EQ(status.pages_done, 9u);
  EXPECT_EQ(status.pages_bad, 0u);
  EXPECT_EQ(status.passes, 1u);
  for (std::uint32_t i = 0; i < 9; ++i) EXPECT_TRUE(client->holds(pages[i], value_of(chain_key(7, i))));
}

TEST(StoreIntegrity, WrongPageIsLostWithItsNameAndThoseBehindIt) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant), other = node.client(tenant);
  SimServer s{node, *client}, o{node, *other};
  const auto pages = s.grow(1, 7, 4);
  ASSERT_TRUE(o.attach(5, 7, 3));
  node.ticks(3);
  node.store->take_notices();
  damage(node, *client, pages[1]);
  EXPECT_EQ(verified(node).pages_bad, 1u);
  EXPECT_EQ(client->entry(pages[1]).state, EntryState::lost);
  EXPECT_EQ(client->entry(pages[0]).state, EntryState::sealed);
  EXPECT_EQ(client->entry(pages[2]).state, EntryState::sealed);  // still held, and good
  EXPECT_NE(client->find(chain_key(7, 0)).page, kNullPage);
  for (std::uint32_t i = 1; i < 4; ++i) EXPECT_EQ(client->find(chain_key(7, i)).page, kNullPage) << i;
  // Both sessions hold it: each is told, once.
  for (auto* c : {client.get(), other.get()}) {
    EXPECT_EQ(c->segment().daemon.lost_pages.load(), 1u);
    std::uint64_t now = 0;
    const auto lost = node.store->lost_pages(c->id, 0, now);
    ASSERT_EQ(lost.size(), 1u);
    EXPECT_EQ(now, 1u);
    EXPECT_EQ(lost[0].page, pages[1]);
    EXPECT_EQ(lost[0].sequence, SequenceId{c == client.get() ? 1u : 5u});
    EXPECT_TRUE(node.store->lost_pages(c->id, 1, now).empty());
  }
  EXPECT_EQ(node.store->take_notices().size(), 2u);
  // The place is used again once nobody holds it.
  s.release(1);
  o.release(5);
  node.ticks(3);
  EXPECT_EQ(client->entry(pages[1]).state, EntryState::free);
  node.store->check_invariants();
}

TEST(StoreIntegrity, TranscodeRefusesToLaunderDamage) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 6);
  s.park(1);
  node.ticks(3);
  damage(node, *client, pages[2]);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(6);
  EXPECT_EQ(client->entry(pages[2]).state, EntryState::lost);
  EXPECT_EQ(client->entry(pages[1]).format, Format::int4);
  EXPECT_EQ(node.store->status().verify.pages_bad_ever, 1u);
  damage(node, *client, pages[1], 0);  // an int4 page has a sum of its own
  EXPECT_EQ(verified(node).pages_bad, 1u);
  EXPECT_EQ(client->entry(pages[1]).state, EntryState::lost);
}

TEST(StoreIntegrity, CachedPageThatNobodyHoldsIsDroppedWithItsDescendants) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 5);
  s.release(1);
  node.ticks(3);
  ASSERT_EQ(node.store->status().tenants[0].cached_pages, 5u);
  damage(node, *client, pages[2]);
  EXPECT_EQ(verified(node, tenant).pages_bad, 1u);
  node.ticks(3);
  EXPECT_EQ(node.store->status().tenants[0].cached_pages, 2u);
  EXPECT_TRUE(s.attach(2, 7, 2));
  EXPECT_EQ(client->segment().daemon.lost_pages.load(), 0u);
  node.store->check_invariants();
}

TEST(StoreIntegrity, NextDaemonComparesEveryPageInTheBackground) {
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 6);
  node.ticks(3);
  damage(node, *client, pages[4]);
  mortal.die();
  EXPECT_TRUE(node.store->status().verify.running);
  EXPECT_EQ(client->entry(pages[4]).state, EntryState::sealed);
  node.ticks(10);
  EXPECT_FALSE(node.store->status().verify.running);
  EXPECT_EQ(node.store->status().verify.pages_done, 6u);
  EXPECT_EQ(client->entry(pages[4]).state, EntryState::lost);
  mortal.die();  // what was lost stays lost, and is told again from the records
  std::uint64_t now = 0;
  EXPECT_EQ(node.store->lost_pages(client->id, 0, now).size(), 1u);
  EXPECT_EQ(now, 1u);
  EXPECT_EQ(client->segment().daemon.lost_pages.load(), 1u);
  EXPECT_EQ(client->entry(pages[4]).state, EntryState::lost);
  node.store->check_invariants();
}

#if defined(KVQ_KILL_POINTS)
TEST(StoreIntegrity, DaemonKilledBetweenMarkingAndTellingStillTells) {
  executioner = {};
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 3);
  node.ticks(3);
  damage(node, *client, pages[0]);
  executioner.at = KillPoint::page_quarantined;
  executioner.countdown = 1;
  node.store->verify(std::nullopt);
  node.ticks(5);
  EXPECT_EQ(mortal.deaths, 1u);
  EXPECT_EQ(executioner.kills, 1u);
  EXPECT_EQ(client->segment().daemon.lost_pages.load(), 1u);
  EXPECT_EQ(client->entry(pages[0]).state, EntryState::lost);
  node.store->check_invariants();
}
#endif

TEST(StoreIntegrity, PageWhoseTranscodeFailedIsSummedUpAllTheSame) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  node.device.hold_jobs = true;
  const auto pages = s.grow(1, 7, 4);
  s.park(1);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.device.faults.fail_for_good = 1;
  node.device.hold_jobs = false;
  node.ticks(3);
  node.device.faults = {};
  node.ticks(5);
  EXPECT_EQ(client->entry(pages[1]).format, Format::dense);
  damage(node, *client, pages[1]);
  EXPECT_EQ(verified(node).pages_bad, 1u);
}

TEST(StoreIntegrity, PassLeavesRoomForTranscodes) {
  StoreNode node(12);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 30).size(), 30u);
  node.ticks(10);
  node.device.hold_jobs = true;
  const std::size_t before = node.device.submitted;
  node.store->verify(std::nullopt);
  node.ticks(10);
  EXPECT_GT(node.device.submitted, before);
  EXPECT_LE(node.device.submitted, before + 16);
  node.device.hold_jobs = false;
  node.ticks(10);
  EXPECT_EQ(node.store->status().verify.pages_done, 30u);
}

TEST(StoreIntegrity, SlabStaysMappedAsLongAsACheckReadsIt) {
  StoreNode node(6);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  node.device.hold_jobs = true;
  ASSERT_EQ(s.grow(1, 7, 4, 0, kPrivate).size(), 4u);
  node.ticks(3);
  EXPECT_GT(node.device.in_flight(), 0u);
  s.release(1);
  node.ticks(10, 50);  // far beyond keep_empty_ms
  EXPECT_LT(node.store->status().slabs_free, 6u);
  node.device.hold_jobs = false;
  node.ticks(10, 50);
  EXPECT_EQ(node.store->status().slabs_free, 6u);
  EXPECT_EQ(node.store->status().verify.pages_bad_ever, 0u);
  node.store->check_invariants();
}

TEST(StoreIntegrity, PageThatMovesUnderACheckIsNotTakenForDamaged) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 4);
  s.park(1);
  node.ticks(3);
  node.device.hold_jobs = true;
  node.store->verify(std::nullopt);
  node.tick();  // the passes' jobs wait
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.tick();
  node.device.hold_jobs = false;
  node.ticks(10);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(client->holds(pages[i], value_of(chain_key(7, i))));
  EXPECT_EQ(client->entry(pages[1]).format, Format::int4);
  EXPECT_EQ(node.store->status().verify.pages_bad_ever, 0u);
  EXPECT_FALSE(node.store->status().verify.running);
}

TEST(StoreIntegrity, WhatACheckSaysOfASlotThatIsAnothersByNowIsNotBelieved) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 2, 0, kPrivate).size(), 2u);
  s.park(1);
  node.ticks(3);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(5);
  node.device.hold_checks = true;
  node.store->verify(std::nullopt);
  node.tick();
  s.release(1);  // nobody's any more, so their slots are free soon
  const auto more = s.grow(3, 9, 4);
  ASSERT_EQ(more.size(), 4u);
  s.park(3);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(10);
  EXPECT_EQ(node.device.written_under_checks, 2u) << "else this is about nothing";
  node.device.hold_checks = false;
  for (int i = 0; i < 100 && node.store->status().verify.running; ++i) node.tick();
  EXPECT_EQ(node.store->status().verify.pages_bad_ever, 0u);
  for (std::uint32_t i = 0; i < 4; ++i) EXPECT_TRUE(client->holds(more[i], value_of(chain_key(9, i)))) << i;
  node.store->check_invariants();
}

// A check that is late reads a slot in the middle of the write that brings the page back to it. What it then sees is
// not the page; a flipped bit stands for that.
TEST(StoreIntegrity, NorWhatItSaysOfAPageThatMovedAwayAndBack) {
  StoreNode node(10);
  auto client = node.client(node.tenant("a", 0, 1.0, true));  // nothing is quantized, so slabs are merged
  SimServer s{node, *client};
  // One page that goes with its sequence.
  const auto grow = [&](std::uint32_t sequence) { return s.grow(sequence, sequence, 1, 0, kPrivate).at(0); };
  const auto merge = [&] {
    ASSERT_TRUE(node.store->set_watermarks({.quantize_at = 0.02, .evict_at = 0.9, .refuse_at = 0.97, .relief = 0.01}));
    node.ticks(5);
    ASSERT_TRUE(node.store->set_watermarks({}));
    node.ticks(3);
  };
  for (std::uint32_t i = 1; i <= 4; ++i) grow(i);  // a slab of four,
  const PageId page = grow(5);                     // and one of another
  s.release(3), s.release(4);
  node.ticks(3);
  const std::uint64_t first = client->entry(page).offset_bytes;
  node.device.hold_checks = true;
  node.store->verify(std::nullopt);
  node.tick();
  merge();
  ASSERT_NE(client->entry(page).offset_bytes, first);
  for (std::uint32_t i = 6; i <= 9; ++i) grow(i);  // the last free slot there, and three where it was
  for (const std::uint32_t i : {1u, 2u, 6u, 7u}) s.release(i);
  node.ticks(3);
  merge();
  ASSERT_EQ(client->entry(page).offset_bytes, first);
  damage(node, *client, page);
  node.device.hold_checks = false;
  node.ticks(3);
  damage(node, *client, page);  // the bit is as it was
  EXPECT_EQ(node.store->status().verify.pages_bad_ever, 0u);
  EXPECT_EQ(verified(node).pages_bad, 0u);
  EXPECT_TRUE(client->holds(page, value_of(chain_key(5, 0))));
  node.store->check_invariants();
}

TEST(StoreIntegrity, AsManyChecksRunAsTheDeviceTakesAtOnce) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 20).size(), 20u);
  node.ticks(5);
  node.device.hold_checks = true;
  node.device.checks = 5;
  node.store->verify(std::nullopt);
  node.ticks(3);
  EXPECT_EQ(node.device.in_flight(), 5u);
  node.device.checks = 9;
  node.ticks(3);
  EXPECT_EQ(node.device.in_flight(), 9u);
  node.device.hold_checks = false;
  EXPECT_EQ(verified(node).pages_done, 40u);
}

TEST(StoreIntegrity, EveryByteOfAPageCounts) {
  const std::uint64_t page_bytes = make_layout(tiny_geometry(), Format::dense).page_bytes;
  for (std::uint64_t byte : {std::uint64_t{0}, std::uint64_t{1}, page_bytes / 2, page_bytes - 1}) {
    StoreNode node(8);
    auto client = node.client(node.tenant("a"));
    SimServer s{node, *client};
    const auto pages = s.grow(1, 7, 1);
    node.ticks(3);
    damage(node, *client, pages[0], byte);
    EXPECT_EQ(verified(node).pages_bad, 1u) << byte;
  }
}

}  // namespace
}  // namespace kvq::testing

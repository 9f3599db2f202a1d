// The daemon's end of a segment: steps as another process writes them, and rings whose indices lie.
#include "daemon/shm/session_segment.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

namespace kvq {
namespace {

struct Ends {
  Ends()
      : daemon(std::move(
            *SessionSegment::create({.session = SessionId{7}, .tenant = TenantId{2}, .owner_pid = 42}, counts))) {
    void* p = ::mmap(nullptr, kSegmentBytes, PROT_READ | PROT_WRITE, MAP_SHARED, daemon.descriptor(), 0);
    EXPECT_NE(p, MAP_FAILED);
    client = static_cast<Segment*>(p);
  }
  ~Ends() { ::munmap(client, kSegmentBytes); }

  void begin(std::uint64_t serial, std::uint64_t epoch) {
    client->step[serial % kStepSlots].epoch.store(epoch);
    client->step[serial % kStepSlots].begun.store(serial);
  }
  void end(std::uint64_t serial) { client->step[serial % kStepSlots].ended.store(serial); }

  // Takes and shows at once, as one transaction does.
  std::optional<Command> next() {
    const std::optional<Command> c = daemon.next_command();
    if (c) daemon.take_command();
    daemon.show();
    return c;
  }
  bool push(const MagazineItem& item) {
    const bool pushed = daemon.push(item);
    daemon.show();
    return pushed;
  }

  RingCounts counts{};
  SessionSegment daemon;
  Segment* client;
};

TEST(SessionSegment, HeaderNamesItsOwner) {
  Ends e;
  EXPECT_EQ(e.client->header.magic, kSegmentMagic);
  EXPECT_EQ(e.client->header.version, kContractVersion);
  EXPECT_EQ(e.client->header.session, SessionId{7});
  EXPECT_EQ(e.client->header.tenant, TenantId{2});
  EXPECT_EQ(e.client->header.owner_pid, 42u);
}

TEST(SessionSegment, OldestOpenStepDecides) {
  Ends e;
  const Epoch now{9};
  EXPECT_EQ(e.daemon.oldest_open(now), Epoch{10});
  e.begin(1, 5);
  e.begin(2, 7);
  EXPECT_EQ(e.daemon.oldest_open(now), Epoch{5});
  EXPECT_EQ(e.daemon.open_steps(), 2u);
  e.end(1);
  EXPECT_EQ(e.daemon.oldest_open(now), Epoch{7});
  e.end(2);
  EXPECT_EQ(e.daemon.oldest_open(now), Epoch{10});
}

TEST(SessionSegment, EpochsAreClampedToThoseThatExist) {
  Ends e;
  e.begin(1, ~std::uint64_t{0});
  EXPECT_EQ(e.daemon.oldest_open(Epoch{9}), Epoch{9});
  e.begin(2, 0);
  EXPECT_EQ(e.daemon.oldest_open(Epoch{9}), Epoch{1});
}

TEST(SessionSegment, StepHasEndedOnceItsSlotSaysSoOrALaterStepDid) {
  Ends e;
  EXPECT_TRUE(e.daemon.step_ended(0));
  EXPECT_FALSE(e.daemon.step_ended(3));  // not begun yet
  e.begin(3, 1);
  EXPECT_FALSE(e.daemon.step_ended(3));
  e.end(3);
  EXPECT_TRUE(e.daemon.step_ended(3));
  e.begin(3 + kStepSlots, 1);
  EXPECT_TRUE(e.daemon.step_ended(3));
  EXPECT_FALSE(e.daemon.step_ended(3 + kStepSlots));
}

TEST(SessionSegment, StepThatItsClientCutShortHasEndedButIsNotComplete) {
  Ends e;
  e.begin(3, 1);
  e.client->step[3].cut_short.store(3);
  EXPECT_FALSE(e.daemon.step_ended(3));
  e.end(3);
  EXPECT_TRUE(e.daemon.step_ended(3));
  EXPECT_TRUE(e.daemon.step_cut_short(3));
  EXPECT_FALSE(e.daemon.step_cut_short(0));
  EXPECT_FALSE(e.daemon.step_cut_short(3 + kStepSlots));
}

TEST(SessionSegment, CommandsArriveInOrderAndOverTheRingsEnd) {
  Ends e;
  auto& ring = e.client->commands;
  std::uint32_t sent = 0, got = 0;
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < kCommandSlots; ++i) {
      ring.item[sent % kCommandSlots].index = sent;
      ring.produced.store(++sent);
    }
    while (const auto c = e.next()) EXPECT_EQ(c->index, got++);
    EXPECT_EQ(got, sent);
    EXPECT_EQ(ring.consumed.load(), sent);
  }
  EXPECT_FALSE(e.daemon.broken());
}

TEST(SessionSegment, MoreCommandsThanTheRingHoldsBreakIt) {
  Ends e;
  e.client->commands.produced.store(kCommandSlots + 1);
  EXPECT_FALSE(e.next());
  EXPECT_TRUE(e.daemon.broken());
  e.client->commands.produced.store(1);  // too late
  EXPECT_FALSE(e.next());
}

TEST(SessionSegment, ClientThatRewritesTheDaemonsIndexFoolsOnlyItself) {
  Ends e;
  e.client->commands.item[0].index = 5;
  e.client->commands.produced.store(1);
  e.client->commands.consumed.store(77);
  const auto c = e.next();
  ASSERT_TRUE(c);
  EXPECT_EQ(c->index, 5u);
  EXPECT_FALSE(e.next());
  EXPECT_FALSE(e.daemon.broken());
}

TEST(SessionSegment, MagazineFillsUpAndSaysSo) {
  Ends e;
  for (std::uint32_t i = 0; i < kMagazineSlots; ++i) ASSERT_TRUE(e.push({PageId{i + 1}, 0, 0}));
  EXPECT_FALSE(e.push({PageId{9}, 0, 0}));
  EXPECT_EQ(e.daemon.magazine_count(), kMagazineSlots);
  e.client->magazine.consumed.store(3);
  EXPECT_EQ(e.daemon.magazine_count(), kMagazineSlots - 3);
  EXPECT_TRUE(e.push({PageId{9}, 0, 0}));
  EXPECT_FALSE(e.daemon.broken());
}

TEST(SessionSegment, ConsumedIndexThatRunsAheadOrBackBreaksTheMagazine) {
  for (std::uint64_t lie : {std::uint64_t{2}, ~std::uint64_t{0}}) {
    Ends e;
    ASSERT_TRUE(e.push({PageId{1}, 0, 0}));
    e.client->magazine.consumed.store(lie);
    EXPECT_EQ(e.daemon.magazine_count(), 0u);
    EXPECT_TRUE(e.daemon.broken());
  }
  Ends e;
  ASSERT_TRUE(e.push({PageId{1}, 0, 0}));
  e.client->magazine.consumed.store(1);
  EXPECT_EQ(e.daemon.magazine_count(), 0u);
  e.client->magazine.consumed.store(0);
  EXPECT_FALSE(e.push({PageId{1}, 0, 0}));
  EXPECT_TRUE(e.daemon.broken());
}

}  // namespace
}  // namespace kvq

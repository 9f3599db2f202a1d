// Clients that write garbage: whatever is in a segment, the store stays whole and other sessions keep their pages.
#include <gtest/gtest.h>

#include <iostream>
#include <random>

#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

struct Hostile {
  Hostile() : node(8), tenant(node.tenant("a")), victim(node.client(tenant, 2)), rogue(node.client(tenant, 2)) {
    SimServer s{node, *victim};
    pages = s.grow(1, 7, 4);
    EXPECT_EQ(pages.size(), 4u);
    node.ticks(2);
  }
  void expect_victim_unharmed() {
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(victim->holds(pages[i], value_of(chain_key(7, i))));
    }
    node.store->check_invariants();
  }

  StoreNode node;
  TenantId tenant;
  std::unique_ptr<SimClient> victim, rogue;
  std::vector<PageId> pages;
};

TEST(StoreHostile, RandomCommandsNeverTouchAnothersPages) {
  const std::uint64_t seed = test_seed(5);
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  Hostile h;
  for (int round = 0; round < 400; ++round) {
    for (int i = 0; i < 32; ++i) {
      Command c;
      auto* words = reinterpret_cast<std::uint64_t*>(&c);
      for (std::size_t w = 0; w < sizeof c / 8; ++w) words[w] = random();
      if (random() % 8 != 0) c.kind = static_cast<CommandKind>(random() % 12);
      if (random() % 8 != 0) c.sequence = SequenceId{static_cast<std::uint32_t>(random() % 6)};
      if (random() % 8 != 0) c.page = PageId{static_cast<std::uint32_t>(random() % 40)};
      if (random() % 8 != 0) c.generation = static_cast<std::uint16_t>(random() % 3);
      if (random() % 8 != 0) c.index = static_cast<std::uint32_t>(random() % 5);
      if (random() % 4 != 0) c.argument = static_cast<std::uint32_t>(random() % 6);
      if (random() % 4 != 0) c.serial = 0;
      h.rogue->send(c);
    }
    h.node.tick();
    if (round % 10 == 0) h.expect_victim_unharmed();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(h.rogue->segment().daemon.commands_refused.load(), 0u);
  h.node.end(h.rogue);
  h.node.ticks(3);
  h.expect_victim_unharmed();
}

TEST(StoreHostile, CommandsOnAnothersPagesAndSequencesAreRefused) {
  Hostile h;
  SimServer bad{h.node, *h.rogue};
  const Entry entry = h.victim->entry(h.pages[0]);
  bad.open(1);
  for (const CommandKind kind : {CommandKind::take, CommandKind::seal, CommandKind::return_credit}) {
    Command c = bad.command(kind, 1);
    c.page = h.pages[0];
    c.generation = entry.generation;
    bad.send(c);
  }
  // The victim's credits lie in its own magazine.
  const auto& m = h.victim->segment().magazine;
  const MagazineItem credit = m.item[m.consumed.load() % kMagazineSlots];
  Command c = bad.command(CommandKind::take, 1);
  c.page = credit.page;
  c.generation = credit.generation;
  bad.send(c);
  bad.act(CommandKind::release, 77);
  bad.act(CommandKind::fork, 2, 1, 99);
  EXPECT_EQ(h.rogue->segment().daemon.commands_refused.load(), 6u);
  EXPECT_EQ(h.node.store->sessions()[1].commands_refused, 6u);
  h.expect_victim_unharmed();
}

TEST(StoreHostile, ImpossibleRingIndicesBreakOnlyTheirSession) {
  Hostile h;
  h.rogue->segment().commands.produced.store(1'000'000);
  h.node.ticks(2);
  EXPECT_EQ(h.node.store->request_credits(h.rogue->id, 1).error().code, Errc::invalid_argument);
  SimServer good{h.node, *h.victim};
  EXPECT_TRUE(good.want(3));
  h.expect_victim_unharmed();
  h.node.end(h.rogue);
  h.node.ticks(2);
  h.expect_victim_unharmed();
}

TEST(StoreHostile, MagazineConsumedBeyondWhatWasProducedBreaksOnlyItsSession) {
  Hostile h;
  h.rogue->segment().magazine.consumed.store(~std::uint64_t{0});
  h.node.ticks(2);
  EXPECT_FALSE(h.node.store->request_credits(h.rogue->id, 1));
  SimServer good{h.node, *h.victim};
  EXPECT_TRUE(good.want(3));
  h.expect_victim_unharmed();
}

TEST(StoreHostile, RandomSegmentBytesNeverEndTheDaemon) {
  const std::uint64_t seed = test_seed(6);
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20; ++round) {
    Hostile h;
    auto* bytes = reinterpret_cast<std::uint64_t*>(&h.rogue->segment());
    for (int turn = 0; turn < 20; ++turn) {
      for (int i = 0; i < 200; ++i)
        bytes[random() % (kSegmentBytes / 8)] = random() % 3 == 0 ? random() : random() % 64;
      h.node.tick();
      (void)h.node.store->request_credits(h.rogue->id, 1 + static_cast<std::uint32_t>(random() % 3));
      (void)h.node.store->sessions();
    }
    h.node.end(h.rogue);
    h.node.ticks(3);
    h.expect_victim_unharmed();
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(StoreHostile, StepsWithEpochsFromTheFutureOnlyHoldUpTheirOwnTenant) {
  Hostile h;
  StepSlot& slot = h.rogue->segment().step[5];
  slot.epoch.store(~std::uint64_t{0});
  slot.begun.store(5);
  SimServer good{h.node, *h.victim};
  good.release(1);
  h.node.ticks(3);
  h.node.store->check_invariants();
  h.node.end(h.rogue);
  h.node.ticks(3);
  EXPECT_EQ(h.node.store->status().limbo_slots, 0u);
}

}  // namespace
}  // namespace kvq::testing

// The store through its public calls, with simulated clients on a host device of a few tiny slabs: pages, seals,
// sharing, sessions. store_pressure_test.cc has what happens when memory gets short.
#include <gtest/gtest.h>

#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

PageStatus page_status(StoreNode& node, TenantId tenant, PageId page) {
  for (const PageStatus& p : node.store->pages(tenant, 10000, node.now_ms)) {
    if (p.page == page) return p;
  }
  return {};
}

TEST(Store, SealedPagesAreFoundAndAttachedByAnotherSession) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto first = node.client(tenant), second = node.client(tenant);
  SimServer one{node, *first}, two{node, *second};
  const std::vector<PageId> pages = one.grow(1, 7, 3);
  ASSERT_EQ(pages.size(), 3u);
  const auto got = two.attach(5, 7, 3);
  ASSERT_TRUE(got) << got.error().context;
  EXPECT_EQ(*got, pages);
  for (std::uint32_t i = 0; i < 3; ++i) EXPECT_TRUE(second->holds(pages[i], value_of(chain_key(7, i))));
  EXPECT_EQ(page_status(node, tenant, pages[1]).references, 2u);
  EXPECT_EQ(node.store->status().tenants[0].counts.lookups, 1u);
  EXPECT_EQ(node.store->status().tenants[0].counts.all_hit_pages(), 3u);
  node.store->check_invariants();
}

TEST(Store, AttachRefusesWhatDoesNotMatch) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant), other = node.client(tenant, 0, 2);
  SimServer s{node, *client};
  const std::vector<PageId> pages = s.grow(1, 7, 3);
  ASSERT_EQ(pages.size(), 3u);
  const Key key = chain_key(7, 2);
  const PrefixHit hit = client->find(key);
  ASSERT_EQ(hit.page, pages[2]);
  const auto attach = [&](const SimClient& c, std::uint32_t sequence, PageId page, int generation, std::uint32_t count,
                          const Key& k) {
    const auto got = node.store->attach(c.id, SequenceId{sequence}, page, static_cast<std::uint16_t>(generation), count,
                                        k, false, node.now_ms);
    return got ? Errc::ok : got.error().code;
  };
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation + 1, 3, key), Errc::stale_id);
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation, 2, key), Errc::stale_id);  // the chain is longer
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation, 4, key), Errc::stale_id);  // and shorter
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation, 0, key), Errc::stale_id);
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation, 3, chain_key(7, 1)), Errc::stale_id);
  EXPECT_EQ(attach(*client, 2, kNullPage, 0, 3, key), Errc::stale_id);
  EXPECT_EQ(attach(*client, 2, PageId{0xffffffff}, 0, 3, key), Errc::stale_id);
  EXPECT_EQ(attach(*other, 2, hit.page, hit.generation, 3, key), Errc::stale_id);           // another geometry
  EXPECT_EQ(attach(*client, 1, hit.page, hit.generation, 2, key), Errc::invalid_argument);  // sequence in use
  EXPECT_EQ(attach(*client, kMaxSequences, hit.page, hit.generation, 3, key), Errc::invalid_argument);
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation, 3, key), Errc::ok);
  EXPECT_EQ(attach(*client, 2, hit.page, hit.generation, 3, key), Errc::ok);  // asked again: the answer was lost
  node.store->check_invariants();
}

TEST(Store, TenantsShareNothing) {
  StoreNode node(8);
  auto a = node.client(node.tenant("a")), b = node.client(node.tenant("b"));
  SimServer one{node, *a}, two{node, *b};
  const std::vector<PageId> pages = one.grow(1, 7, 2);
  ASSERT_EQ(pages.size(), 2u);
  EXPECT_EQ(b->find(chain_key(7, 1)).page, kNullPage);
  const PrefixHit hit = a->find(chain_key(7, 1));
  EXPECT_FALSE(
      node.store->attach(b->id, SequenceId{1}, hit.page, hit.generation, 2, chain_key(7, 1), false, node.now_ms));
  EXPECT_EQ(b->mapped_slabs(), 0u);
  ASSERT_EQ(two.grow(1, 7, 2).size(), 2u);
  EXPECT_EQ(a->mapped_slabs(), 1u);
  EXPECT_EQ(b->mapped_slabs(), 1u);
}

// The first page of a sequence, written in a step and not sealed yet.
class StoreSeal : public ::testing::Test {
 protected:
  // In a step of this server itself.
  std::uint64_t seal_in_own_step() {
    const std::uint64_t step = client->begin_step();
    s.seal(1, 0, item, key, step);
    return step;
  }
  // In a step of another session.
  void seal_in_step_of_worker(std::uint64_t step) {
    Command c = s.command(CommandKind::seal, 1);
    c.page = item.page;
    c.generation = item.generation;
    c.argument = raw(worker->id);
    c.serial = step;
    std::memcpy(c.key, key.data(), key.size());
    s.send(c);
  }
  EntryState state() const { return client->entry(item.page).state; }

  StoreNode node{8};
  const TenantId tenant = node.tenant("a");
  std::unique_ptr<SimClient> client = node.client(tenant), worker = node.client(tenant);
  SimServer s{node, *client};
  const Key key = chain_key(1, 0);
  const MagazineItem item = [this] {
    EXPECT_TRUE(s.want(1));
    s.open(1);
    return s.take(1, 0, key);
  }();
};

TEST_F(StoreSeal, WaitsForTheStepThatWrites) {
  const std::uint64_t step = seal_in_own_step();
  node.ticks(3);
  EXPECT_EQ(state(), EntryState::open);
  EXPECT_EQ(client->find(key).page, kNullPage);
  client->end_step(step);
  node.tick();
  EXPECT_EQ(state(), EntryState::sealed);
  EXPECT_EQ(client->find(key).page, item.page);
}

TEST_F(StoreSeal, WaitsForAStepThatHasNotBegunYet) {
  seal_in_step_of_worker(1);
  node.ticks(2);
  EXPECT_EQ(state(), EntryState::open);
  const std::uint64_t step = worker->begin_step();
  ASSERT_EQ(step, 1u);
  node.tick();
  EXPECT_EQ(state(), EntryState::open);
  worker->end_step(step);
  node.tick();
  EXPECT_EQ(client->find(key).page, item.page);
}

TEST_F(StoreSeal, InAStepThatItsClientCutShortIsDoneButNeverShared) {
  const std::uint64_t step = seal_in_own_step();
  node.tick();
  client->segment().step[step % kStepSlots].cut_short.store(step);
  client->end_step(step);
  node.ticks(2);
  EXPECT_EQ(state(), EntryState::sealed);
  EXPECT_EQ(client->find(key).page, kNullPage);
}

TEST_F(StoreSeal, InAStepThatDiedIsDoneButNeverShared) {
  seal_in_step_of_worker(worker->begin_step());
  node.tick();
  node.end(worker);
  node.tick();
  EXPECT_EQ(state(), EntryState::sealed);
  EXPECT_EQ(client->find(key).page, kNullPage);
}

TEST(Store, DuplicateContentStaysOutOfTheIndexAndGoesWithItsSequence) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  const std::vector<PageId> first = s.grow(1, 7, 2), second = s.grow(2, 7, 3);
  ASSERT_EQ(second.size(), 3u);
  EXPECT_EQ(client->find(chain_key(7, 1)).page, first[1]);
  EXPECT_FALSE(page_status(node, tenant, second[1]).indexed);
  // New content after duplicates continues the chain that is indexed.
  EXPECT_TRUE(page_status(node, tenant, second[2]).indexed);
  const auto got = s.attach(3, 7, 3);
  ASSERT_TRUE(got);
  EXPECT_EQ(*got, (std::vector<PageId>{first[0], first[1], second[2]}));
  s.release(2);
  node.ticks(3);
  EXPECT_EQ(client->entry(second[0]).state, EntryState::free);
  EXPECT_EQ(client->entry(second[2]).state, EntryState::sealed);
  node.store->check_invariants();
}

TEST(Store, PrivatePagesAreNeverFound) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_TRUE(s.want(2));
  s.open(1);
  const MagazineItem first = s.take(1, 0, chain_key(1, 0)), second = s.take(1, 1, chain_key(1, 1));
  s.seal(1, 0, first, chain_key(1, 0), 0, kPrivate);
  s.seal(1, 1, second, chain_key(1, 1));  // its predecessor has no name, so it gets none
  s.drain();
  EXPECT_EQ(client->find(chain_key(1, 0)).page, kNullPage);
  EXPECT_EQ(client->find(chain_key(1, 1)).page, kNullPage);
  s.release(1);
  node.ticks(2);
  EXPECT_EQ(node.store->status().tenants[0].cached_pages, 0u);
}

TEST(Store, FreedEntryStaysForTheStepThatMayReadIt) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_TRUE(s.want(1));
  s.open(1);
  const MagazineItem item = s.take(1, 0, chain_key(1, 0));
  s.drain();
  const std::uint64_t step = client->begin_step();
  const Entry loaded = client->entry(item.page);
  s.release(1);
  node.ticks(5);
  EXPECT_EQ(client->entry(item.page), loaded);
  EXPECT_TRUE(client->holds(loaded, value_of(chain_key(1, 0))));
  client->end_step(step);
  node.tick();
  EXPECT_EQ(client->entry(item.page).state, EntryState::free);
  EXPECT_NE(client->entry(item.page).generation, loaded.generation);
}

TEST(Store, StepThatBeganAfterRetirementHoldsNothingUp) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_TRUE(s.want(1));
  s.open(1);
  const MagazineItem item = s.take(1, 0, chain_key(1, 0));
  s.drain();
  const std::uint64_t old_step = client->begin_step();
  s.release(1);
  node.tick();
  const std::uint64_t new_step = client->begin_step();
  client->end_step(old_step);
  node.tick();
  EXPECT_EQ(client->entry(item.page).state, EntryState::free);
  client->end_step(new_step);
}

TEST(Store, SlabWaitsForAcknowledgements) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant), slow = node.client(tenant);
  SimServer s{node, *client};
  slow->answers_at_once = false;
  EXPECT_FALSE(s.want(1, 5));
  EXPECT_EQ(client->mapped_slabs(), 1u);
  slow->answer();
  EXPECT_TRUE(s.want(1, 1));
}

TEST(Store, SessionThatIsNotReadyGetsNothingAndHoldsNobodyUp) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 2).size(), 2u);
  SessionRequest request;
  request.tenant = tenant;
  request.geometry = tiny_geometry();
  request.credits = 2;
  SimClient late(*node.store, tenant, request.geometry, StoreNode::kSlabBytes, 512, node.config.max_pages);
  late.answers_at_once = false;
  node.joining = &late;
  const auto id = node.store->open_session(request, node.now_ms);
  ASSERT_TRUE(id);
  late.connect(*id);
  node.joining = nullptr;
  node.clients[*id] = &late;
  EXPECT_FALSE(node.store->is_ready(*id));
  EXPECT_EQ(node.store->request_credits(*id, 1).error().code, Errc::invalid_argument);
  EXPECT_EQ(node.store->attach(*id, SequenceId{1}, PageId{1}, 0, 1, chain_key(7, 0), false, node.now_ms).error().code,
            Errc::invalid_argument);
  node.ticks(2);
  EXPECT_EQ(late.magazine(), 0u);
  EXPECT_TRUE(s.want(7));  // a further slab, which the others need not wait for
  late.answer();
  EXPECT_TRUE(node.store->is_ready(*id));
  node.ticks(2);
  EXPECT_EQ(late.magazine(), 2u);
  node.store->process_ended(*id, node.now_ms);
}

TEST(Store, DeadSessionReleasesAll) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant, 3), other = node.client(tenant);
  SimServer s{node, *client};
  node.tick();
  ASSERT_EQ(s.grow(1, 7, 3).size(), 3u);
  ASSERT_TRUE(s.want(2));
  s.open(2);
  s.take(2, 0, chain_key(9, 0));
  s.drain();
  client->begin_step();  // and never ends
  node.store->disconnect(client->id);
  node.ticks(3);
  EXPECT_EQ(node.store->sessions().size(), 2u);
  EXPECT_EQ(node.store->status().tenants[0].cached_pages, 0u);
  node.end(client);
  node.tick();
  const TenantStatus t = node.store->status().tenants[0];
  EXPECT_EQ(t.open_pages, 0u);
  EXPECT_EQ(t.sealed_pages, 3u);
  EXPECT_EQ(t.cached_pages, 3u);
  EXPECT_EQ(node.store->status().limbo_slots, 0u);
  node.store->check_invariants();
}

TEST(Store, SlabGoesBackWhenItsImportersHaveDroppedItOrEnded) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant), gone = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_TRUE(s.want(1));
  s.open(1);
  s.take(1, 0, chain_key(1, 0));
  s.drain();
  node.store->disconnect(gone->id);
  s.release(1);
  node.ticks(4, 100);
  EXPECT_EQ(client->mapped_slabs(), 0u);
  EXPECT_EQ(node.store->status().slabs_free, 7u);  // the lost process may still have it mapped
  node.end(gone);
  EXPECT_EQ(node.store->status().slabs_free, 8u);
  EXPECT_EQ(node.store->status().tenants[0].slab_bytes, 0u);
}

TEST(Store, PagesOfALostConnectionStayWhereTheyAre) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant), other = node.client(tenant);
  SimServer s{node, *client};
  const std::vector<PageId> pages = s.grow(1, 7, 6);
  ASSERT_EQ(pages.size(), 6u);
  s.park(1);
  node.store->disconnect(client->id);
  EXPECT_EQ(node.store->quantize(std::nullopt, 0, false, node.now_ms).pages, 0u);
  node.ticks(3);
  for (PageId p : pages) EXPECT_EQ(other->entry(p).format, Format::dense);
  node.end(client);
  EXPECT_EQ(node.store->quantize(std::nullopt, 0, false, node.now_ms).pages, 6u);
  node.ticks(3);
  for (PageId p : pages) EXPECT_EQ(other->entry(p).format, Format::int4);
  for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(other->holds(pages[i], value_of(chain_key(7, i))));
}

TEST(Store, StepOfALostConnectionKeepsThePagesItMayReadInPlace) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto reader = node.client(tenant), owner = node.client(tenant);
  SimServer s{node, *owner};
  const std::vector<PageId> pages = s.grow(1, 7, 6);
  ASSERT_EQ(pages.size(), 6u);
  s.park(1);
  const std::uint64_t step = reader->begin_step();
  EXPECT_EQ(reader->segment().daemon.revoked.load(), 0u);
  node.store->disconnect(reader->id);
  EXPECT_EQ(reader->segment().daemon.revoked.load(), 1u);
  EXPECT_EQ(node.store->quantize(std::nullopt, 0, false, node.now_ms).pages, 6u);
  node.ticks(3);
  for (PageId p : pages) EXPECT_EQ(owner->entry(p).format, Format::dense);
  reader->end_step(step);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(3);
  for (PageId p : pages) EXPECT_EQ(owner->entry(p).format, Format::int4);
}

TEST(Store, ForkSharesCompletePagesAndTruncateGivesUpTheRest) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  const std::vector<PageId> pages = s.grow(1, 7, 4);
  ASSERT_EQ(pages.size(), 4u);
  s.act(CommandKind::fork, 2, 3, 1);
  EXPECT_EQ(page_status(node, tenant, pages[2]).references, 2u);
  EXPECT_EQ(page_status(node, tenant, pages[3]).references, 1u);
  s.act(CommandKind::truncate, 1, 1);
  EXPECT_EQ(page_status(node, tenant, pages[0]).references, 2u);
  EXPECT_EQ(page_status(node, tenant, pages[2]).references, 1u);
  EXPECT_EQ(page_status(node, tenant, pages[3]).references, 0u);
  s.act(CommandKind::drop_before, 2, 2);
  EXPECT_EQ(page_status(node, tenant, pages[1]).references, 0u);
  EXPECT_EQ(client->segment().daemon.commands_refused.load(), 0u);
  node.store->check_invariants();
}

TEST(Store, DrainingAdmitsNobody) {
  StoreNode node(8);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 2).size(), 2u);
  node.store->start_draining();
  SessionRequest request;
  request.tenant = tenant;
  request.geometry = tiny_geometry();
  EXPECT_EQ(node.store->open_session(request, node.now_ms).error().code, Errc::draining);
  EXPECT_EQ(s.attach(2, 7, 2).error().code, Errc::draining);
  EXPECT_EQ(client->segment().daemon.draining.load(), 1u);
  EXPECT_TRUE(s.want(1));  // what runs may finish
}

TEST(Store, NoticesNameSessionsWhoseWordsOrMagazineChanged) {
  StoreNode node(8);
  auto client = node.client(node.tenant("a"), 2);
  node.store->take_notices();
  node.ticks(2);
  EXPECT_EQ(client->magazine(), 2u);
  EXPECT_EQ(node.store->take_notices(), std::vector<SessionId>{client->id});
  node.tick();
  EXPECT_TRUE(node.store->take_notices().empty());
}

TEST(Store, GeometriesThatCannotBeServedAreRefused) {
  StoreNode node(4);
  SessionRequest request;
  request.tenant = node.tenant("a");
  const auto code = [&](ModelGeometry g) {
    request.geometry = g;
    return node.store->open_session(request, node.now_ms).error().code;
  };
  EXPECT_EQ(code(ModelGeometry{}), Errc::wrong_layout);
  EXPECT_EQ(code(tiny_geometry(5)), Errc::wrong_layout);  // a page is larger than a slab
  ModelGeometry odd = tiny_geometry();
  odd.layer[0].head_dim = 72;
  EXPECT_EQ(code(odd), Errc::wrong_layout);
  EXPECT_EQ(code(tiny_geometry(4)), Errc::ok);
}

}  // namespace
}  // namespace kvq::testing

// A next daemon takes over: what goes on, who may come back, and what is refused whole.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <random>

#include "daemon/shm/memfd.h"
#include "daemon/shm/table_file.h"
#include "tests/support/sim_server.h"

namespace kvq::testing {
namespace {

std::set<std::string> names(const Kept& kept) {
  std::set<std::string> out;
  for (const auto& [name, fd] : kept) out.insert(name);
  return out;
}

SessionRequest request_of(const SimClient& c) {
  SessionRequest request;
  request.tenant = c.tenant;
  request.geometry = c.geometry;
  return request;
}

SessionToken token_of(const SimClient& c) {
  SessionToken token;
  std::memcpy(token.data(), c.segment().header.token, token.size());
  return token;
}

TEST(StoreAdopt, SessionsGoOnBeforeTheirClientsAreBack) {
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant, 3);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 2);
  node.ticks(3);
  const std::uint64_t instance = node.store->status().instance;
  client->stays_away = true;
  mortal.die();
  EXPECT_EQ(node.store->status().instance, instance);
  EXPECT_TRUE(node.store->status().adopt.adopted);
  EXPECT_EQ(node.store->status().adopt.sessions, 1u);
  EXPECT_EQ(node.store->status().adopt.sequences, 1u);
  ASSERT_EQ(node.store->sessions().size(), 1u);
  EXPECT_TRUE(node.store->sessions()[0].waits_for_client);
  // Commands in the ring are carried out and the magazine is filled, without any connection.
  const MagazineItem item = s.take(1, 2, chain_key(7, 2));
  s.seal(1, 2, item, chain_key(7, 2));
  node.ticks(3);
  EXPECT_EQ(client->entry(item.page).state, EntryState::sealed);
  EXPECT_EQ(client->magazine(), 3u);
  EXPECT_EQ(client->segment().daemon.commands_refused.load(), 0u);
  for (std::uint32_t i = 0; i < 2; ++i) EXPECT_TRUE(client->holds(pages[i], value_of(chain_key(7, i))));
  client->stays_away = false;
  node.resume_all();
  EXPECT_FALSE(node.store->sessions()[0].waits_for_client);
  node.store->check_invariants();
}

TEST(StoreAdopt, OnlyWhoProvesItComesBackAndOnlyOnce) {
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  const TenantId tenant = node.tenant("a"), foreign = node.tenant("b");
  auto client = node.client(tenant);
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 2).size(), 2u);
  const SessionToken token = token_of(*client);
  const auto resume = [&](SessionId id, const SessionToken& t, const SessionRequest& request) {
    return node.store->resume_session(id, t, request, node.now_ms).error().code;
  };
  EXPECT_EQ(resume(client->id, token, request_of(*client)), Errc::stale_id);  // it has its client
  client->stays_away = true;
  mortal.die();
  SessionToken wrong = token;
  wrong[15] ^= 1;
  EXPECT_EQ(resume(client->id, wrong, request_of(*client)), Errc::permission_denied);
  client->segment().header.token[15] ^= 1;  // what a client writes there is not what the daemon compares with
  EXPECT_EQ(resume(client->id, wrong, request_of(*client)), Errc::permission_denied);
  SessionRequest other = request_of(*client);
  other.tenant = foreign;
  EXPECT_EQ(resume(client->id, token, other), Errc::permission_denied);
  other = request_of(*client);
  other.geometry = tiny_geometry(2);
  EXPECT_EQ(resume(client->id, token, other), Errc::wrong_layout);
  other = request_of(*client);
  other.maps_slabs = false;
  EXPECT_EQ(resume(client->id, token, other), Errc::wrong_layout);
  EXPECT_EQ(resume(SessionId{raw(client->id) + 1}, token, request_of(*client)), Errc::stale_id);
  EXPECT_TRUE(node.store->sessions()[0].waits_for_client);
  EXPECT_EQ(resume(client->id, token, request_of(*client)), Errc::ok);
  EXPECT_EQ(resume(client->id, token, request_of(*client)), Errc::stale_id);
  node.store->check_invariants();
}

TEST(StoreAdopt, WhoLostItsConnectionBeforeCannotComeBack) {
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 2);
  const std::uint64_t step = client->begin_step();
  node.store->disconnect(client->id);
  mortal.die();
  EXPECT_FALSE(node.store->adopted_sessions()[0].waits);
  EXPECT_EQ(client->segment().daemon.revoked.load(), 1u);
  EXPECT_FALSE(node.store->sessions()[0].connected);
  EXPECT_EQ(node.store->sessions()[0].open_steps, 1u);
  EXPECT_TRUE(client->holds(pages[1], value_of(chain_key(7, 1))));
  client->end_step(step);
  node.store->check_invariants();
}

TEST(StoreAdopt, SessionThatWasNotReadyEndsAndItsClientStartsOver) {
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  const TenantId tenant = node.tenant("a");
  auto first = node.client(tenant, 2);
  node.ticks(3);
  first->answers_at_once = false;
  SessionRequest request = request_of(*first);
  node.joining = first.get();
  ASSERT_TRUE(node.store->open_session(request, node.now_ms));
  ASSERT_EQ(node.store->sessions().size(), 2u);
  node.joining = nullptr;
  mortal.die();
  EXPECT_EQ(node.store->sessions().size(), 1u);
  EXPECT_EQ(node.store->sessions()[0].id, first->id);
  EXPECT_FALSE(node.keeper.held().contains("kvq-segment-" + std::to_string(raw(first->id) + 1)));
  node.store->check_invariants();
}

TEST(StoreAdopt, NothingIsKeptThatNoRecordNeeds) {
  StoreNode node(8);
  MortalStore& mortal = node.make_mortal();
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  ASSERT_EQ(s.grow(1, 7, 6).size(), 6u);
  const std::set<std::string> global = {"kvq-root",   "kvq-tenants",   "kvq-sessions", "kvq-slabs",
                                        "kvq-models", "kvq-sequences", "kvq-chunks",   "kvq-journal"};
  std::set<std::string> expected = global;
  expected.insert({"kvq-pages-1", "kvq-directory-1", "kvq-prefix-1", "kvq-segment-1", "kvq-slab-0", "kvq-slab-1"});
  EXPECT_EQ(names(node.keeper.held()), expected);
  // Leftovers of a daemon that died between keeping and recording, or between forgetting a record and its file.
  node.keeper.keep("kvq-slab-7", node.device.descriptor(SlabId{0}, true));
  node.keeper.keep("kvq-segment-99", node.device.descriptor(SlabId{0}, true));
  node.keeper.keep("kvq-pid-99", node.device.descriptor(SlabId{0}, true));
  node.keeper.keep("kvq-pages-2", node.device.descriptor(SlabId{0}, true));
  mortal.die();
  EXPECT_EQ(names(node.keeper.held()), expected);
  node.end(client);
  EXPECT_FALSE(node.keeper.held().contains("kvq-segment-1"));
}

TEST(StoreAdopt, SlotsThatAnOpenStepMayReadAreNotReused) {
  StoreNode node(6);
  MortalStore& mortal = node.make_mortal();
  auto client = node.client(node.tenant("a"));
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 4);
  s.park(1);
  node.ticks(3);
  const std::uint64_t step = client->begin_step();
  const Entry before = client->entry(pages[1]);
  node.store->quantize(std::nullopt, 0, false, node.now_ms);
  node.ticks(5);
  ASSERT_EQ(client->entry(pages[1]).format, Format::int4);
  mortal.die();  // the limbo dies with it
  const auto more = s.grow(2, 8, 8);
  EXPECT_EQ(more.size(), 8u);
  EXPECT_TRUE(client->holds(before, value_of(chain_key(7, 1)))) << "its old place was given out under an open step";
  EXPECT_GT(node.store->status().limbo_slots, 0u);
  client->end_step(step);
  node.ticks(3);
  EXPECT_EQ(node.store->status().limbo_slots, 0u);
  node.store->check_invariants();
}

TEST(StoreAdopt, TenantsKeepTheirRandomSaltsAndTakeTheConfigurationsRest) {
  StoreNode node(8);
  TenantSpec spec;
  spec.name = "a";
  spec.random_salt = true;
  spec.salt.fill(1);
  node.store->add_tenant(spec);
  auto adopted = node.adopt();
  ASSERT_NE(adopted, nullptr);
  spec.salt.fill(2);
  spec.quota_bytes = 3 * StoreNode::kSlabBytes;
  EXPECT_EQ(adopted->add_tenant(spec), TenantId{1});
  EXPECT_EQ(adopted->tenant(TenantId{1}).salt[0], 1);
  EXPECT_EQ(adopted->status().tenants[0].quota_bytes, spec.quota_bytes);
  TenantSpec fixed = spec;
  fixed.name = "b";
  EXPECT_EQ(adopted->add_tenant(fixed), TenantId{2});
  node.store = std::move(adopted);
}

TEST(StoreAdopt, EvictedSessionHoldsNothingButItsOpenSteps) {
  StoreNode node(6);
  const TenantId tenant = node.tenant("a");
  auto client = node.client(tenant, 2);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 4);
  node.ticks(3);
  const std::uint64_t step = client->begin_step();
  const Entry read = client->entry(pages[0]);
  EXPECT_EQ(node.store->evict(SessionId{99}, node.now_ms).error().code, Errc::stale_id);
  ASSERT_TRUE(node.store->evict(client->id, node.now_ms));
  EXPECT_EQ(client->segment().daemon.revoked.load(), 1u);
  s.open(2);  // its ring is read no more
  node.ticks(200);
  const SessionStatus status = node.store->sessions()[0];
  EXPECT_TRUE(status.evicted);
  EXPECT_EQ(status.sequences + status.credits, 0u);
  EXPECT_GE(status.oldest_step_ms, 199u);
  EXPECT_GT(status.limbo_bytes, 0u);  // its credits, whose slots its step might read
  EXPECT_TRUE(client->holds(read, value_of(chain_key(7, 0))));
  client->end_step(step);
  node.ticks(3);
  EXPECT_EQ(node.store->status().limbo_slots, 0u);
  node.end(client);
  node.store->check_invariants();
}

// The clock of another boot, or of a machine that was set back or far ahead.
TEST(StoreAdopt, ClockThatJumpedMattersToNobody) {
  StoreNode node(6);
  MortalStore& mortal = node.make_mortal();
  auto client = node.client(node.tenant("a"), 2);
  SimServer s{node, *client};
  const auto pages = s.grow(1, 7, 6);
  s.park(1);
  node.ticks(5, 1000);
  for (const std::uint64_t now_ms : {std::uint64_t{3}, std::uint64_t{1} << 45, std::uint64_t{1}}) {
    node.now_ms = now_ms;
    mortal.die();
    node.ticks(5);
    node.store->quantize(std::nullopt, 0, false, node.now_ms);
    node.ticks(5);
    node.store->check_invariants();
    for (std::uint32_t i = 0; i < 6; ++i) EXPECT_TRUE(client->holds(pages[i], value_of(chain_key(7, i))));
  }
  EXPECT_EQ(client->entry(pages[2]).format, Format::int4);
}

// --- states that cannot be trusted ---

struct Refusal {
  Errc code = Errc::ok;
  std::string why;
};

Refusal try_adopt(StoreNode& node, Kept kept, StoreConfig config, std::uint32_t places = 12) {
  const auto device =
      make_host_device(6 * StoreNode::kSlabBytes, StoreNode::kSlabBytes, run_inline(), places * StoreNode::kSlabBytes);
  Refusal out;
  MapKeeper keeper;
  auto adopted = Store::adopt(
      config, *device, [](const SlabNotice&) {}, [](const std::string&) {}, keeper, kept, out.why, node.now_ms);
  if (adopted) {
    (*adopted)->tick(node.now_ms);
    (*adopted)->check_invariants();
  }
  out.code = adopted.error().code;
  return out;
}

struct Written : StoreNode {
  Written() : StoreNode(6) {
    client_ = client(tenant("a"), 2);
    SimServer s{*this, *client_};
    EXPECT_EQ(s.grow(1, 7, 5).size(), 5u);
    EXPECT_EQ(s.grow(2, 8, 3).size(), 3u);
    s.release(2);
    ticks(3);
    other_ = client(tenant("b"));
    // From here on the state is only read.
  }
  std::unique_ptr<SimClient> client_, other_;
};

TEST(StoreAdopt, NothingLeftIsNotAFailure) {
  StoreNode node(6);
  EXPECT_EQ(try_adopt(node, {}, node.config).code, Errc::stale_id);
}

TEST(StoreAdopt, StateOfAnotherShapeIsRefusedWithBothValues) {
  Written node;
  EXPECT_EQ(try_adopt(node, node.keeper.hand_over(), node.config).code, Errc::ok);
  StoreConfig config = node.config;
  config.max_pages = 512;
  EXPECT_EQ(try_adopt(node, node.keeper.hand_over(), config).why, "max_pages was 256, now it is 512");
  const Refusal larger = try_adopt(node, node.keeper.hand_over(), node.config, 13);
  EXPECT_EQ(larger.code, Errc::invalid_argument);
  EXPECT_EQ(larger.why, "the arena's range of addresses was 786432, now it is 851968");
}

TEST(StoreAdopt, EachMissingOrWrongFileIsNamed) {
  Written node;
  for (const std::string& name : names(node.keeper.held())) {
    Kept kept = node.keeper.hand_over();
    kept.erase(name);
    const Refusal missing = try_adopt(node, std::move(kept), node.config);
    EXPECT_NE(missing.code, Errc::ok) << name;
    if (name != "kvq-root") {
      EXPECT_EQ(missing.why.rfind(name + ": ", 0), 0u) << missing.why;
    }
    kept = node.keeper.hand_over();
    kept[name] = Descriptor(::memfd_create("unsealed", MFD_CLOEXEC));
    EXPECT_NE(try_adopt(node, std::move(kept), node.config).why.find(name), std::string::npos) << name;
    kept = node.keeper.hand_over();
    kept[name] = Descriptor(::fcntl(node.keeper.held().at("kvq-models").get(), F_DUPFD_CLOEXEC, 3));
    if (name != "kvq-models") {
      EXPECT_NE(try_adopt(node, std::move(kept), node.config).code, Errc::ok) << name;
    }
  }
}

TEST(StoreAdopt, NewerStateIsRefusedByItsVersion) {
  Written node;
  for (const char* name : {"kvq-root", "kvq-sessions", "kvq-pages-1"}) {
    std::byte* at = map_file(node.keeper.held().at(name).get(), 4096, true);
    auto& header = *reinterpret_cast<TableHeader*>(at);
    ++header.version;
    const Refusal refusal = try_adopt(node, node.keeper.hand_over(), node.config);
    EXPECT_EQ(refusal.why, std::string(name) + ": written in another state version");
    --header.version;
    ::munmap(at, 4096);
  }
  EXPECT_EQ(try_adopt(node, node.keeper.hand_over(), node.config).code, Errc::ok);
}

// A copy of a state with random words changed is refused, or it is a state that the store can live with.
TEST(StoreAdopt, DamagedRecordsAreRefusedOrHarmless) {
  Written node;
  const std::uint64_t seed = test_seed(51);
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  std::uint32_t refused = 0, accepted = 0;
  for (int round = 0; round < 1500; ++round) {
    Kept kept;
    std::vector<std::string> tables;
    for (const auto& [name, fd] : node.keeper.held()) {
      const auto bytes = static_cast<std::uint64_t>(::lseek(fd.get(), 0, SEEK_END));
      auto copy = make_memory_file("copy", bytes);
      ASSERT_TRUE(copy);
      std::byte* from = map_file(fd.get(), bytes, true);
      ASSERT_EQ(::pwrite(copy->get(), from, bytes, 0), static_cast<ssize_t>(bytes));
      ::munmap(from, bytes);
      kept[name] = std::move(*copy);
      if (!name.starts_with("kvq-slab-") && !name.starts_with("kvq-prefix")) tables.push_back(name);
    }
    for (std::uint32_t n = 1 + random() % 3; n > 0; --n) {
      const std::string& name = tables[random() % tables.size()];
      const auto bytes = static_cast<std::uint64_t>(::lseek(kept[name].get(), 0, SEEK_END));
      // Most records are unused: prefer the beginning, where the used ones are.
      const std::uint64_t at = random() % std::min<std::uint64_t>(bytes, random() % 2 == 0 ? 1024 : bytes);
      std::uint8_t byte = 0;
      ASSERT_EQ(::pread(kept[name].get(), &byte, 1, static_cast<off_t>(at)), 1);
      byte = static_cast<std::uint8_t>(random() % 2 == 0 ? byte ^ (1u << (random() % 8)) : random());
      ASSERT_EQ(::pwrite(kept[name].get(), &byte, 1, static_cast<off_t>(at)), 1);
    }
    (try_adopt(node, std::move(kept), node.config).code == Errc::ok ? accepted : refused) += 1;
  }
  std::cout << "refused " << refused << " accepted " << accepted << std::endl;
  EXPECT_GT(refused, 100u);
  EXPECT_GT(accepted, 100u);
}

}  // namespace
}  // namespace kvq::testing

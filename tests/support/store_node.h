// A whole store in one process: host device behind the misbehaving one, simulated clients, a clock that tests turn.
#pragma once

#include <bit>
#include <memory>

#include "tests/support/fake_device.h"
#include "tests/support/mortal_store.h"
#include "tests/support/seed.h"
#include "tests/support/sim_client.h"

namespace kvq::testing {

// One layer, one KV head, d = 64: a dense page is 16384 bytes, an int4 page 4608.
inline ModelGeometry tiny_geometry(std::uint32_t layers = 1) {
  ModelGeometry g;
  g.layers = layers;
  for (std::uint32_t i = 0; i < layers; ++i) g.layer[i] = {1, 64, Dtype::fp16, 0};
  return g;
}

struct StoreNode {
  static constexpr std::uint64_t kSlabBytes = 65536;  // 4 dense pages, 14 int4 pages

  explicit StoreNode(std::uint32_t slabs, StoreConfig configuration = small(), std::uint64_t seed = 1)
      : config(configuration),
        slab_count(slabs),
        place_count(2 * slabs),
        device(make_host_device(slabs * kSlabBytes, kSlabBytes, run_inline(), place_count * kSlabBytes), seed) {
    store = Store::create(
        config, device, [this](const SlabNotice& n) { deliver(n); },
        [this](const std::string& line) { lines.push_back(line); }, &keeper);
  }

  // From here on the daemon may die; see mortal_store.h.
  MortalStore& make_mortal() {
    auto made = std::make_unique<MortalStore>(std::move(store), [this] { return adopt(); });
    MortalStore& mortal = *made;
    mortal.after_adoption = [this] {
      for (auto& [id, c] : clients) c->forget_answers();
      resume_all();
    };
    store = std::move(made);
    return mortal;
  }

  std::unique_ptr<Store> adopt() {
    device.replace(make_host_device(slab_count * kSlabBytes, kSlabBytes, run_inline(), place_count * kSlabBytes));
    Kept kept = keeper.hand_over();
    std::string why;
    auto adopted = Store::adopt(
        config, device, [this](const SlabNotice& n) { deliver(n); },
        [this](const std::string& line) { lines.push_back(line); }, keeper, kept, why, now_ms);
    EXPECT_TRUE(adopted) << why;
    return adopted ? std::move(*adopted) : nullptr;
  }

  // The clients that are there come back, all but those that stay away for now.
  void resume_all() {
    std::vector<SessionId> waiting;
    for (const AdoptedSession& s : store->adopted_sessions()) {
      if (s.waits) waiting.push_back(s.id);
    }
    for (SessionId id : waiting) {
      const auto found = clients.find(id);
      if (found == clients.end() || found->second->stays_away) continue;
      SessionToken token;
      std::memcpy(token.data(), found->second->segment().header.token, token.size());
      SessionRequest request;
      request.tenant = found->second->tenant;
      request.geometry = found->second->geometry;
      request.maps_slabs = found->second->maps_slabs;
      const Result<void> resumed = store->resume_session(id, token, request, now_ms);
      EXPECT_TRUE(resumed) << resumed.error().context;
    }
  }

  static StoreConfig small() {
    StoreConfig c;
    c.max_pages = 256;
    c.max_sequences = 128;
    c.keep_empty_ms = 50;
    return c;
  }

  TenantId tenant(const std::string& name, std::uint64_t quota_slabs = 0, double share = 1.0,
                  bool floor_dense = false) {
    TenantSpec spec;
    spec.name = name;
    spec.quota_bytes = quota_slabs * kSlabBytes;
    spec.share = share;
    spec.floor_dense = floor_dense;
    return store->add_tenant(spec);
  }

  std::unique_ptr<SimClient> client(TenantId tenant, std::uint32_t credits = 0, std::uint32_t layers = 1,
                                    bool floor_dense = false, bool maps_slabs = true) {
    SessionRequest request;
    request.tenant = tenant;
    request.geometry = tiny_geometry(layers);
    request.floor_dense = floor_dense;
    request.maps_slabs = maps_slabs;
    request.credits = credits;
    auto made = std::make_unique<SimClient>(*store, tenant, request.geometry, kSlabBytes,
                                            std::bit_ceil(std::uint64_t{config.max_pages} * 2), config.max_pages);
    joining = made.get();  // notices come before open_session returns the id
    const Result<SessionId> id = store->open_session(request, now_ms);
    EXPECT_TRUE(id) << id.error().context;
    joining = nullptr;
    made->maps_slabs = maps_slabs;
    made->connect(*id);
    clients[*id] = made.get();
    if (made->answers_at_once) made->answer();
    return made;
  }

  void end(std::unique_ptr<SimClient>& client) {
    store->process_ended(client->id, now_ms);
    clients.erase(client->id);
    client.reset();
  }

  TickReport tick(std::uint64_t ms = 1) {
    now_ms += ms;
    return store->tick(now_ms);
  }
  void ticks(int count, std::uint64_t ms = 1) {
    for (int i = 0; i < count; ++i) tick(ms);
  }

  StoreConfig config;
  std::uint32_t slab_count, place_count;  // as configured; the most that there may be
  MapKeeper keeper;
  FakeDevice device;
  std::unique_ptr<Store> store;
  std::map<SessionId, SimClient*> clients;
  SimClient* joining = nullptr;
  std::vector<std::string> lines;
  std::uint64_t now_ms = 1000;

 private:
  void deliver(const SlabNotice& n) {
    const auto found = clients.find(n.session);
    SimClient* c = found != clients.end() ? found->second : joining;
    ASSERT_NE(c, nullptr);
    if (c == joining) {
      const bool at_once = std::exchange(c->answers_at_once, false);
      c->on_notice(n);
      c->answers_at_once = at_once;
    } else {
      c->on_notice(n);
    }
  }
};

}  // namespace kvq::testing

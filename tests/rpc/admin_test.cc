// The operator's calls: who may make them, what they answer, what they refuse.
#include <nlohmann/json.hpp>

#include "tests/rpc/harness.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using nlohmann::json;

wire::Admin::Client admin_of(Harness& h, Client& client) {
  auto response = h.wait(send(client.node.adminRequest()));
  EXPECT_EQ(response.getStatus().getCode(), 0) << response.getStatus().getMessage().cStr();
  return response.getAdmin();
}

// The test's own user is the operator, root or not.
RpcOptions own_uid() {
  RpcOptions options;
  options.admin_uids = {::getuid()};
  return options;
}

struct Outcome {
  Errc code;
  std::string message;
  json document;
};

Outcome set(Harness& h, wire::Admin::Client admin, const std::string& key, const std::string& value) {
  auto request = admin.setRequest();
  request.setKey(key);
  request.setValue(value);
  auto response = h.wait(send(kj::mv(request)));
  const auto status = response.getStatus();
  return {static_cast<Errc>(status.getCode()), status.getMessage().cStr(),
          status.getCode() == 0 ? json::parse(response.getJson().cStr()) : json()};
}

TEST(Admin, StatusNamesEverythingFromTheFirstDocumentOn) {
  Harness h(own_uid());
  h.store.add_tenant({.name = "alpha", .quota_bytes = 4096});
  Client client = h.connect();
  auto admin = admin_of(h, client);
  const json status = json::parse(h.wait(send(admin.statusRequest())).getJson().cStr());
  for (const char* key :
       {"version", "pid", "uptime_ms", "device", "connections", "sessions", "parked_requests", "level", "draining",
        "arena", "watermarks", "transcodes", "dropped_pages", "refusals", "limbo_slots"}) {
    EXPECT_TRUE(status.contains(key)) << key;
  }
  EXPECT_EQ(status["connections"], 1);
  EXPECT_EQ(status["tenants"][0]["name"], "alpha");
  EXPECT_EQ(status["tenants"][0]["formats"]["int4"]["pages"], 0);
}

TEST(Admin, SessionsTenantsAndPagesAreListed) {
  Harness h(own_uid());
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  auto admin = admin_of(h, client);
  const json sessions = json::parse(h.wait(send(admin.sessionsRequest())).getJson().cStr());
  EXPECT_EQ(sessions["sessions"][0]["label"], "test server");
  EXPECT_EQ(sessions["sessions"][0]["tenant"], "uid-" + std::to_string(::getuid()));
  const json tenants = json::parse(h.wait(send(admin.tenantsRequest())).getJson().cStr());
  EXPECT_EQ(tenants["tenants"].size(), 1u);
  auto request = admin.pagesRequest();
  request.setLimit(2);
  const json pages = json::parse(h.wait(send(kj::mv(request))).getJson().cStr());
  EXPECT_EQ(pages["pages"].size(), 2u);
  EXPECT_EQ(pages["pages"][1]["format"], "dense");
}

TEST(Admin, AnUnknownTenantIsNamedWithTheKnownOnes) {
  Harness h(own_uid());
  h.store.add_tenant({.name = "alpha"});
  Client client = h.connect();
  auto admin = admin_of(h, client);
  auto request = admin.quantizeRequest();
  request.setTenant("beta");
  auto response = h.wait(send(kj::mv(request)));
  EXPECT_EQ(static_cast<Errc>(response.getStatus().getCode()), Errc::invalid_argument);
  EXPECT_STREQ(response.getStatus().getMessage().cStr(), "no tenant is called \"beta\"; known: alpha");
  EXPECT_EQ(h.store.count("quantize"), 0u);
}

TEST(Admin, DryRunOnlySays) {
  Harness h(own_uid());
  Client client = h.connect();
  auto admin = admin_of(h, client);
  auto request = admin.quantizeRequest();
  request.setDryRun(true);
  const json report = json::parse(h.wait(send(kj::mv(request))).getJson().cStr());
  EXPECT_EQ(report["pages"], 3);
  EXPECT_EQ(report["dry_run"], true);
  EXPECT_EQ(h.store.count("quantize"), 0u);
  EXPECT_EQ(h.store.count("quantize dry"), 1u);
}

TEST(Admin, SettingsAreChecked) {
  Harness h(own_uid());
  h.store.add_tenant({.name = "alpha"});
  Client client = h.connect();
  auto admin = admin_of(h, client);
  EXPECT_EQ(set(h, admin, "quantize_at", "0.5").document["quantize_at"], 0.5);
  EXPECT_EQ(h.store.watermarks.quantize_at, 0.5);
  EXPECT_EQ(set(h, admin, "quota.alpha", "8MiB").document["quota_bytes"], 8u << 20);
  EXPECT_EQ(set(h, admin, "share.alpha", "2.5").document["share"], 2.5);
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{{"quantize_at", "half"},
                                                                                   {"quantize_at", "1.5"},
                                                                                   {"quantize_at", "nan"},
                                                                                   {"quantize_at", ""},
                                                                                   {"evict_at", "0.4"},
                                                                                   {"quota.alpha", "-1"},
                                                                                   {"quota.alpha", "8 apples"},
                                                                                   {"quota.beta", "1"},
                                                                                   {"share.alpha", "0"},
                                                                                   {"tenant", "x"}}) {
    const Outcome outcome = set(h, admin, key, value);
    EXPECT_EQ(outcome.code, Errc::invalid_argument) << key << "=" << value;
    EXPECT_FALSE(outcome.message.empty());
  }
  EXPECT_EQ(h.store.watermarks.quantize_at, 0.5);
  EXPECT_EQ(h.store.tenants[0].quota_bytes, 8u << 20);
  EXPECT_NE(set(h, admin, "evict_at", "0.4").message.find("evict_at = 0.4"), std::string::npos);
}

TEST(Admin, DrainReturnsWhenTheLastSessionEnds) {
  Harness h(own_uid());
  auto client = kj::heap<Client>(*h.io.lowLevelProvider, h.path);
  Sink::Seen seen;
  kj::Maybe<capnp::Response<wire::Node::RegisterResults>> response = h.register_model(*client, seen);
  Client operator_client = h.connect();
  auto admin = admin_of(h, operator_client);
  auto request = admin.drainRequest();
  request.setDeadlineMs(kPatienceMs);
  auto draining = send(kj::mv(request));
  h.until([&] { return h.store.draining; });
  {
    Client late = h.connect();
    auto registration = late.node.registerRequest();
    fill(registration.initRequest(), kj::heap<Sink>(seen));
    auto refused = h.wait(send(kj::mv(registration)));
    EXPECT_EQ(static_cast<Errc>(refused.getStatus().getCode()), Errc::draining);
  }
  response = nullptr;
  client = nullptr;
  const json report = json::parse(h.wait(kj::mv(draining)).getJson().cStr());
  EXPECT_EQ(report["sessions_left"], 0);
  h.wait(h.server->drained());
}

TEST(Admin, DrainEndsAtItsDeadline) {
  Harness h(own_uid());
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  auto admin = admin_of(h, client);
  auto request = admin.drainRequest();
  request.setDeadlineMs(30);
  const json report = json::parse(h.wait(send(kj::mv(request))).getJson().cStr());
  EXPECT_EQ(report["sessions_left"], 1);
  h.wait(h.server->drained());
}

template <typename Request>
json answer(Harness& h, Request&& request) {
  auto response = h.wait(send(kj::mv(request)));
  EXPECT_EQ(response.getStatus().getCode(), 0) << response.getStatus().getMessage().cStr();
  return json::parse(response.getJson().cStr());
}

TEST(Admin, EvictAsksForWhatIsCachedOfATenantOrOfAll) {
  Harness h(own_uid());
  h.store.add_tenant({.name = "alpha"});
  Client client = h.connect();
  auto admin = admin_of(h, client);
  auto dry = admin.evictRequest();
  dry.setIdleMs(70);
  dry.setDryRun(true);
  EXPECT_EQ(answer(h, kj::mv(dry)), json::parse(R"({"dry_run": true, "pages": 5, "bytes": 500})"));
  EXPECT_FALSE(h.logged("evict_asked"));
  const std::uint64_t ticks = h.store.ticks;
  auto request = admin.evictRequest();
  request.setTenant("alpha");
  EXPECT_EQ(answer(h, kj::mv(request))["dry_run"], false);
  EXPECT_TRUE(h.logged("event=evict_asked pages=5 bytes=500 idle_ms=0"));
  EXPECT_EQ(h.store.calls, (std::vector<std::string>{"drop_cached all 70 dry", "drop_cached 1 0"}));
  h.until([&] { return h.store.ticks > ticks; });
  auto unknown = admin.evictRequest();
  unknown.setTenant("beta");
  EXPECT_EQ(h.wait(send(kj::mv(unknown))).getStatus().getCode(), static_cast<int>(Errc::invalid_argument));
}

TEST(Admin, CompactAsksForSlabsOfATenantOrOfAll) {
  Harness h(own_uid());
  h.store.add_tenant({.name = "alpha"});
  Client client = h.connect();
  auto admin = admin_of(h, client);
  auto dry = admin.compactRequest();
  dry.setTenant("alpha");
  dry.setDryRun(true);
  EXPECT_EQ(answer(h, kj::mv(dry)), json::parse(R"({"dry_run": true, "pages": 4, "bytes": 400, "slabs": 2})"));
  EXPECT_FALSE(h.logged("compact_asked"));
  EXPECT_EQ(answer(h, admin.compactRequest())["slabs"], 2);
  EXPECT_TRUE(h.logged("event=compact_asked pages=4 bytes=400 slabs=2"));
  EXPECT_EQ(h.store.calls, (std::vector<std::string>{"compact 1 dry", "compact all"}));
  auto unknown = admin.compactRequest();
  unknown.setTenant("beta");
  EXPECT_EQ(h.wait(send(kj::mv(unknown))).getStatus().getCode(), static_cast<int>(Errc::invalid_argument));
}

Outcome resize(Harness& h, wire::Admin::Client admin, std::uint64_t bytes, bool dry_run = false,
               const char* device = "") {
  auto request = admin.resizeRequest();
  request.setArenaBytes(bytes);
  request.setDevice(device);
  request.setDryRun(dry_run);
  auto response = h.wait(send(kj::mv(request)));
  const auto status = response.getStatus();
  return {static_cast<Errc>(status.getCode()), status.getMessage().cStr(),
          status.getCode() == 0 ? json::parse(response.getJson().cStr()) : json()};
}

TEST(Admin, ResizeChangesTheArenaAndSaysWhatIsAboveIt) {
  RpcOptions options = own_uid();
  options.device = "host";
  Harness h(std::move(options));
  Client client = h.connect();
  auto admin = admin_of(h, client);
  h.store.slabs_used = 6;
  const Outcome dry = resize(h, admin, 4 << 20, true);
  EXPECT_EQ(dry.document, json::parse(R"({"dry_run": true, "device": "host", "arena_bytes": 4194304,
                                          "arena_bytes_before": 8388608, "slabs_used": 6, "slabs_over": 2})"));
  EXPECT_FALSE(h.logged("resize_asked"));
  EXPECT_EQ(resize(h, admin, 64 << 20, false, "host").document["slabs_over"], 0);
  EXPECT_TRUE(h.logged("event=resize_asked device=host arena_bytes=67108864 arena_bytes_before=8388608 slabs_over=0"));
  EXPECT_EQ(resize(h, admin, 8 << 20).document["arena_bytes_before"], 64 << 20);
  EXPECT_EQ(h.store.calls, (std::vector<std::string>{"resize 4 dry", "resize 64", "resize 8"}));
}

TEST(Admin, ASizeThatCannotBeIsRefusedWithThoseThatCan) {
  RpcOptions options = own_uid();
  options.device = "host";
  Harness h(std::move(options));
  Client client = h.connect();
  auto admin = admin_of(h, client);
  const Outcome uneven = resize(h, admin, (5 << 20) + 4096);
  EXPECT_EQ(uneven.code, Errc::invalid_argument);
  EXPECT_EQ(uneven.message, "the arena of host cannot become 5124KiB: it is whole slabs of 1MiB, so 5MiB or 6MiB");
  const Outcome small = resize(h, admin, 1 << 20);
  EXPECT_EQ(small.code, Errc::invalid_argument);
  EXPECT_NE(small.message.find("2MiB at least"), std::string::npos) << small.message;
  const Outcome large = resize(h, admin, 65 << 20);
  EXPECT_EQ(large.code, Errc::limit_reached);
  EXPECT_NE(large.message.find("addresses for 64MiB were reserved"), std::string::npos) << large.message;
  EXPECT_EQ(resize(h, admin, 4 << 20, false, "GPU-x").code, Errc::invalid_argument);
  h.store.exporter = "legacy";
  const Outcome legacy = resize(h, admin, 4 << 20);
  EXPECT_EQ(legacy.code, Errc::limit_reached);
  EXPECT_NE(legacy.message.find("one allocation of 8MiB"), std::string::npos) << legacy.message;
  EXPECT_EQ(h.store.calls, std::vector<std::string>{});
}

}  // namespace
}  // namespace kvq

// The documents of sequences and of the prefix index, and their tables.
#include <nlohmann/json.hpp>

#include "tests/rpc/harness.h"
#include "tools/kvqctl/content_tables.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using Json = nlohmann::ordered_json;

SequenceStatus sequence(std::uint32_t number, std::uint64_t pages) {
  SequenceStatus s;
  s.session = SessionId{1};
  s.tenant = TenantId{1};
  s.sequence = SequenceId{number};
  s.running = true;
  s.pages = pages;
  s.tokens = pages * kPageTokens;
  s.format[1] = {pages, pages << 20};
  s.shared_pages = 1;
  s.lost_pages = 2;
  s.idle_ms = 1500;
  return s;
}

// An operator of a kvqd with one tenant.
struct Caller {
  static RpcOptions own_uid() {
    RpcOptions options;
    options.admin_uids = {::getuid()};
    return options;
  }
  struct Outcome {
    Errc code;
    std::string message;
    Json document;
  };
  template <typename Request>
  Outcome ask(Request&& request) {
    auto response = h.wait(send(kj::mv(request)));
    const auto status = response.getStatus();
    return {static_cast<Errc>(status.getCode()), status.getMessage().cStr(),
            response.hasJson() ? Json::parse(response.getJson().cStr()) : Json()};
  }
  wire::Admin::Client admin() {
    auto response = h.wait(send(client.node.adminRequest()));
    EXPECT_EQ(response.getStatus().getCode(), 0) << response.getStatus().getMessage().cStr();
    return response.getAdmin();
  }

  Harness h{own_uid(), 1, [](FakeStore& store) { store.add_tenant({.name = "alpha"}); }, {"GPU-2"}};
  Client client = h.connect();
};

TEST(ListCalls, SequencesOfAllDevicesAreOneList) {
  Caller c;
  c.h.more[0]->add_tenant({.name = "alpha"});
  c.h.store.sequence_list.longest = {sequence(1, 9), sequence(2, 3)};
  c.h.more[0]->sequence_list.longest = {sequence(3, 5)};
  auto request = c.admin().sequencesRequest();
  request.setLimit(2);
  const Json document = c.ask(kj::mv(request)).document;
  EXPECT_EQ(document["limit"], 2);
  EXPECT_EQ(document["total"], 3);
  ASSERT_EQ(document["sequences"].size(), 2u);
  const Json& first = document["sequences"][0];
  EXPECT_EQ(first["sequence"], 1);
  EXPECT_EQ(first["tenant"], "alpha");
  EXPECT_EQ(first["state"], "running");
  EXPECT_EQ(first["formats"]["dense"]["bytes"], 9 << 20);
  EXPECT_EQ(document["sequences"][1]["device"], "GPU-2");
  const std::string table = kvqctl::show_sequences(document);
  for (const char* text : {"SEQUENCE", "DEVICE", "9.0 MiB", "1.5 s", "(the longest 2 of 3; more with --limit)"}) {
    EXPECT_NE(table.find(text), std::string::npos) << text << " in\n" << table;
  }
}

TEST(ListCalls, NamesThatNothingHasAreRefused) {
  Caller c;
  auto session = c.admin().sequencesRequest();
  session.setSession(77);
  EXPECT_EQ(c.ask(kj::mv(session)).message, "there is no session 77; kvqctl sessions lists them");
  auto tenant = c.admin().sequencesRequest();
  tenant.setTenant("beta");
  EXPECT_EQ(c.ask(kj::mv(tenant)).message, "no tenant is called \"beta\"; known: alpha");
  auto device = c.admin().prefixRequest();
  device.setDevice("GPU-9");
  const Caller::Outcome outcome = c.ask(kj::mv(device));
  EXPECT_EQ(outcome.code, Errc::invalid_argument);
  EXPECT_EQ(outcome.message, "no device is called \"GPU-9\"; kvqctl status names them");
}

TEST(ListCalls, ThePrefixIndexHasSumsAndChains) {
  Caller c;
  PrefixUse use{.tenant = TenantId{1}, .capacity = 512};
  use.indexed[1] = 6;
  use.indexed[2] = 4;
  use.cached[2] = 3;
  ChainStatus chain{.tenant = TenantId{1}, .page = PageId{8}, .generation = 2, .pages = 10};
  chain.format[2] = {10, 10 << 20};
  chain.references = 1;
  chain.idle_ms = 90'000;
  c.h.store.prefix_status = {{use}, {chain}, false};
  c.h.store.counts.hit_pages[2] = 30;
  c.h.store.counts.sealed_pages = 10;
  c.h.store.counts.lookups = 5;
  c.h.store.counts.hits = 4;
  auto request = c.admin().prefixRequest();
  request.setTenant("alpha");
  const Json document = c.ask(kj::mv(request)).document;
  const Json& sums = document["tenants"][0];
  EXPECT_EQ(sums["entries"], 10);
  EXPECT_EQ(sums["cached_pages"], 3);
  EXPECT_EQ(sums["formats"]["int4"]["tokens"], 4 * kPageTokens);
  EXPECT_EQ(sums["formats"]["int4"]["hit_tokens"], 30 * kPageTokens);
  EXPECT_EQ(sums["attaches"], 5);
  EXPECT_EQ(sums["attaches_met"], 4);
  EXPECT_EQ(sums["hit_rate"], 0.75);
  EXPECT_EQ(document["chains"][0]["tokens"], 10 * kPageTokens);
  EXPECT_EQ(document["complete"], false);
  const std::string table = kvqctl::show_prefix(document);
  for (const char* text : {"75 %", "10.0 MiB", "1 min 30 s", "not all"}) {
    EXPECT_NE(table.find(text), std::string::npos) << text << " in\n" << table;
  }
}

TEST(ListCalls, NothingCachedIsToldAsSuch) {
  Caller c;
  EXPECT_EQ(kvqctl::show_sequences(c.ask(c.admin().sequencesRequest()).document), "no sequences\n");
  c.h.store.prefix_status = {{{.tenant = TenantId{1}, .capacity = 512}}, {}, true};
  const Json document = c.ask(c.admin().prefixRequest()).document;
  EXPECT_EQ(document["tenants"][0]["hit_rate"], 0.0);
  EXPECT_NE(kvqctl::show_prefix(document).find("no chain is cached"), std::string::npos);
}

}  // namespace
}  // namespace kvq

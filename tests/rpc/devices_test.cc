// One server in front of several devices: which store is asked, and what counts over all of them.
#include <map>
#include <nlohmann/json.hpp>

#include "tests/rpc/harness.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using nlohmann::json;

constexpr const char* kFirst = "GPU-1111";
constexpr const char* kSecond = "GPU-2222";

class RpcDevices : public ::testing::Test {
 protected:
  ~RpcDevices() noexcept override {}
  RpcOptions options() const {
    RpcOptions out;
    out.configured = &configured;
    out.served_as = kFirst;
    out.admin_uids = {::getuid()};
    out.max_sessions = 3;
    out.max_sessions_per_peer = 2;
    return out;
  }
  struct Answer {
    Errc code;
    std::string message;
    std::uint32_t session;
  };
  Answer ask(const std::string& device, std::uint32_t resumes = 0, wire::Role role = wire::Role::BOTH) {
    auto request = client.node.registerRequest();
    fill(request.initRequest(), kj::heap<Sink>(seen));
    request.getRequest().setDevice(device);
    request.getRequest().setRole(role);
    request.getRequest().setResumeSession(resumes);
    request.getRequest().setResumeToken(kj::arrayPtr(FakeStore::kToken.data(), FakeStore::kToken.size()));
    answers.push_back(h.wait(send(kj::mv(request))));
    const auto status = answers.back().getStatus();
    return {static_cast<Errc>(status.getCode()), status.getMessage().cStr(), answers.back().getInfo().getSession()};
  }
  wire::Admin::Client admin() { return h.wait(send(operator_.node.adminRequest())).getAdmin(); }
  FakeStore& first() { return h.store; }
  FakeStore& second() { return *h.more.front(); }

  mutable Configured configured;
  Harness h{options(), 1, [](FakeStore&) {}, {kSecond}};
  Client client = h.connect(), operator_ = h.connect();
  Sink::Seen seen;
  std::vector<capnp::Response<wire::Node::RegisterResults>> answers;
};

TEST_F(RpcDevices, ARegistrationGoesToTheDeviceThatItNames) {
  const auto served = h.wait(send(client.node.devicesRequest()));
  ASSERT_EQ(served.getDevices().size(), 2u);
  EXPECT_EQ(served.getDevices()[1], kSecond);
  EXPECT_EQ(ask(kSecond).session, kSessionsOfRange + 1);
  EXPECT_EQ(ask(kFirst).session, 1u);
  EXPECT_EQ(second().live.size(), 1u);
  EXPECT_EQ(first().live.size(), 1u);
  h.until([&] { return seen.maps == 2; });
}

TEST_F(RpcDevices, OneThatNamesNoneOrAnotherIsToldWhichThereAre) {
  for (const wire::Role role : {wire::Role::BOTH, wire::Role::CONTROL}) {
    const Answer none = ask("", 0, role);
    EXPECT_EQ(none.code, Errc::invalid_argument);
    EXPECT_EQ(none.message, "this kvqd has several devices (\"GPU-1111\", \"GPU-2222\"); name one of them as device");
  }
  EXPECT_EQ(ask("GPU-3333").message,
            "device \"GPU-3333\" is not served here; this kvqd has \"GPU-1111\", \"GPU-2222\"");
  EXPECT_EQ(first().live.size() + second().live.size(), 0u);
}

TEST_F(RpcDevices, SessionsOfAProcessAndInAllCountOverAllDevices) {
  ask(kFirst);
  ask(kSecond);
  EXPECT_EQ(ask(kFirst).code, Errc::limit_reached) << "two of one process";
  EXPECT_TRUE(h.logged("event=refused cause=sessions_of_process limit=2"));
}

TEST_F(RpcDevices, WhatAConnectionHadEndsWithItOnEveryDevice) {
  {
    Client other = h.connect();
    std::swap(client.node, other.node);
    ask(kFirst);
    ask(kSecond);
    answers.clear();
    std::swap(client.node, other.node);
  }
  h.until([&] { return first().count("disconnect") == 1 && second().count("disconnect") == 1; });
}

TEST_F(RpcDevices, AnOperatorsVerbsReachEveryDeviceAndASessionItsOwn) {
  ask(kFirst);
  const std::uint32_t id = ask(kSecond).session;
  auto a = admin();
  const json status = json::parse(h.wait(send(a.statusRequest())).getJson().cStr());
  EXPECT_EQ(status["sessions"], 2);
  EXPECT_EQ(status["devices"][1]["name"], kSecond);
  EXPECT_FALSE(status.contains("arena"));
  auto verify = a.verifyRequest();
  verify.setDeadlineMs(60'000);
  auto verified = send(kj::mv(verify));
  h.until([&] { return first().verifying.running && second().verifying.running; });
  first().verifying = {.pages_total = 3, .pages_done = 3, .pages_bad = 1};
  second().verifying = {.pages_total = 4, .pages_done = 4};
  const json report = json::parse(h.wait(kj::mv(verified)).getJson().cStr());
  EXPECT_EQ(report["pages"], 7);
  EXPECT_EQ(report["bad"], 1);
  auto quantize = h.wait(send(a.quantizeRequest()));
  EXPECT_EQ(json::parse(quantize.getJson().cStr())["pages"], 6);
  auto evict = a.evictSessionRequest();
  evict.setSession(id);
  EXPECT_EQ(h.wait(send(kj::mv(evict))).getStatus().getCode(), 0);
  EXPECT_EQ(first().count("evict"), 0u);
  EXPECT_EQ(second().count("evict"), 1u);
}

TEST_F(RpcDevices, ADrainEndsWhenNoDeviceHasASessionLeft) {
  ask(kSecond);
  auto a = admin();
  auto drain = a.drainRequest();
  drain.setDeadlineMs(60'000);
  auto drained = send(kj::mv(drain));
  bool over = false;
  auto watched = h.server->drained().then([&over] { over = true; }).eagerlyEvaluate(nullptr);
  h.until([&] { return first().draining && second().draining; });
  EXPECT_FALSE(over);
  answers.clear();
  const json report = json::parse(h.wait(kj::mv(drained)).getJson().cStr());
  EXPECT_EQ(report["sessions_left"], 0);
  h.until([&] { return over; });
}

TEST_F(RpcDevices, ASettingIsOfAllDevicesAndATenantsOfThoseThatHaveIt) {
  second().add_tenant({.name = "beta"});
  auto a = admin();
  const auto set = [&](const char* key, const char* value) {
    auto request = a.setRequest();
    request.setKey(key);
    request.setValue(value);
    const auto response = h.wait(send(kj::mv(request)));
    return std::string(response.getStatus().getMessage().cStr());
  };
  EXPECT_EQ(set("quantize_at", "0.4"), "");
  EXPECT_EQ(first().watermarks.quantize_at, 0.4);
  EXPECT_EQ(second().watermarks.quantize_at, 0.4);
  EXPECT_EQ(set("share.beta", "3"), "");
  EXPECT_EQ(second().tenants[0].share, 3.0);
  EXPECT_EQ(set("share.gamma", "3"), "no tenant is called \"gamma\"; known: beta");
  EXPECT_NE(set("evict_at", "2"), "");
}

TEST_F(RpcDevices, ASettingThatOneDeviceRefusesChangesNone) {
  for (FakeStore* store : {&first(), &second()}) store->add_tenant({.name = "alpha", .quota_bytes = 8 << 20});
  second().slab_bytes = 4 << 20;
  auto request = admin().setRequest();
  request.setKey("quota.alpha");
  request.setValue("2MiB");
  const auto response = h.wait(send(kj::mv(request)));
  EXPECT_NE(std::string(response.getStatus().getMessage().cStr()).find("at least one slab (4194304 bytes)"),
            std::string::npos);
  EXPECT_EQ(first().tenants[0].quota_bytes, 8u << 20);
  EXPECT_EQ(second().tenants[0].quota_bytes, 8u << 20);
}

TEST_F(RpcDevices, ASettingIsToldOnceBesideWhatIsConfigured) {
  first().add_tenant({.name = "alpha", .quota_bytes = 8 << 20, .share = 2});
  second().add_tenant({.name = "alpha", .quota_bytes = 8 << 20, .share = 2});
  second().add_tenant({.name = "left"});
  auto a = admin();
  const auto settings = [&] {
    const json status = json::parse(h.wait(send(a.statusRequest())).getJson().cStr());
    std::map<std::string, json> out;
    for (const json& s : status["settings"]) {
      EXPECT_TRUE(out.emplace(s["key"], s).second) << s;
    }
    return out;
  };
  EXPECT_EQ(settings()["share.alpha"]["live"], false);
  configured.tenants["alpha"] = {8 << 20, 3};
  configured.watermarks = first().watermarks;
  const auto now = settings();
  EXPECT_EQ(now.size(), 8u);
  EXPECT_EQ(now.at("share.alpha")["live"], true);
  EXPECT_EQ(now.at("share.alpha")["configured"], 3.0);
  EXPECT_EQ(now.at("quota.alpha")["live"], false);
  EXPECT_EQ(now.at("relief")["live"], false);
  EXPECT_EQ(now.at("share.left")["configured"], nullptr) << "an earlier daemon's: the configuration says nothing";
  EXPECT_EQ(now.at("share.left")["live"], false);
}

}  // namespace
}  // namespace kvq

// Registration, descriptors, parked requests and the end of sessions, over a real socket with a scripted store.
#include <sys/eventfd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "daemon/rpc/bell.h"
#include "tests/rpc/harness.h"

namespace kvq {
namespace {

using namespace kvq::testing;
using Spoil = std::function<void(wire::Registration::Builder)>;

// Registers with one thing wrong; returns the status.
std::pair<Errc, std::string> refused(Harness& h, const Spoil& spoil) {
  Client client = h.connect();
  Sink::Seen seen;
  auto request = client.node.registerRequest();
  auto registration = request.initRequest();
  fill(registration, kj::heap<Sink>(seen));
  spoil(registration);
  auto response = h.wait(send(kj::mv(request)));
  EXPECT_FALSE(response.hasSession());
  EXPECT_TRUE(h.store.live.empty());
  return {static_cast<Errc>(response.getStatus().getCode()), response.getStatus().getMessage().cStr()};
}

TEST(Registration, TellsTheClientAllItNeeds) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  const auto info = response.getInfo();
  EXPECT_EQ(info.getTenantName(), ("uid-" + std::to_string(::getuid())).c_str());
  EXPECT_EQ(info.getSalt().size(), 32u);
  EXPECT_EQ(info.getSalt()[1], 2);
  EXPECT_EQ(info.getSlabBytes(), 1u << 20);
  const SessionRequest& request = h.store.live.begin()->second.request;
  EXPECT_EQ(request.pid, static_cast<std::uint32_t>(::getpid()));
  EXPECT_EQ(request.label, "test server");
  EXPECT_EQ(request.geometry.layers, 2u);
  EXPECT_EQ(request.geometry.layer[1].head_dim, 64);
  EXPECT_EQ(request.credits, 4u);
}

TEST(Registration, AnotherContractVersionIsRefused) {
  Harness h;
  const auto [code, message] = refused(h, [](auto r) { r.setContractVersion(kContractVersion + 1); });
  EXPECT_EQ(code, Errc::version_mismatch);
  EXPECT_NE(message.find("one release"), std::string::npos) << message;
}

TEST(Registration, WrongGeometryIsRefusedByName) {
  Harness h;
  auto [code, message] = refused(h, [](auto r) { r.getLayers()[1].setHeadDim(96 + 1); });
  EXPECT_EQ(code, Errc::wrong_layout);
  EXPECT_NE(message.find("layer 1: head_dim 97"), std::string::npos) << message;
  EXPECT_EQ(refused(h, [](auto r) { r.setPageTokens(16); }).first, Errc::wrong_layout);
  EXPECT_EQ(refused(h, [](auto r) { r.initLayers(0); }).first, Errc::wrong_layout);
  EXPECT_EQ(refused(h, [](auto r) { r.initLayers(kMaxLayers + 1); }).first, Errc::wrong_layout);
  EXPECT_EQ(refused(h, [](auto r) { r.getLayers()[0].setKvHeads(0); }).first, Errc::wrong_layout);
  EXPECT_EQ(refused(h, [](auto r) { r.getLayers()[0].setDtype(2); }).first, Errc::wrong_layout);
}

TEST(Registration, IncompleteRequestsAreRefused) {
  Harness h;
  EXPECT_EQ(refused(h, [](auto r) { r.initFingerprint(31); }).first, Errc::invalid_argument);
  EXPECT_EQ(refused(h, [](auto r) { r.setCredits(4097); }).first, Errc::invalid_argument);
  EXPECT_EQ(refused(h, [](auto r) { r.disownSlabs(); }).first, Errc::invalid_argument);
}

TEST(Registration, TheStoresRefusalReachesTheClient) {
  Harness h;
  h.store.open_error = {Errc::over_quota, 0, "the tenant's quota is used up"};
  const auto [code, message] = refused(h, [](auto) {});
  EXPECT_EQ(code, Errc::over_quota);
  EXPECT_EQ(message, "the tenant's quota is used up");
}

TEST(Registration, LabelsCannotForgeLogLines) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto request = client.node.registerRequest();
  fill(request.initRequest(), kj::heap<Sink>(seen));
  request.getRequest().setLabel("a\nlevel=error \"b\x1b[2J");
  h.wait(send(kj::mv(request)));
  EXPECT_EQ(h.store.live.begin()->second.request.label, "a?level=error ?b?[2J");
}

TEST(Registration, OneConnectionHasABoundedNumberOfModels) {
  RpcOptions options;
  options.max_sessions_per_peer = 2;
  Harness h(std::move(options));
  Client client = h.connect();
  Sink::Seen seen;
  auto first = h.register_model(client, seen);
  auto second = h.register_model(client, seen);
  auto request = client.node.registerRequest();
  fill(request.initRequest(), kj::heap<Sink>(seen));
  auto third = h.wait(send(kj::mv(request)));
  EXPECT_EQ(static_cast<Errc>(third.getStatus().getCode()), Errc::limit_reached);
}

TEST(Registration, UnlistedUsersAreRefusedWhenTheConfigurationSaysSo) {
  RpcOptions options;
  options.rules.push_back({TenantId{1}, {::getuid() + 1}, {}});
  Harness h(std::move(options));
  const auto [code, message] = refused(h, [](auto) {});
  EXPECT_EQ(code, Errc::permission_denied);
  EXPECT_NE(message.find("uid " + std::to_string(::getuid())), std::string::npos) << message;
}

TEST(Registration, AListedGroupPicksTheTenant) {
  RpcOptions options;
  options.rules.push_back({TenantId{1}, {::getuid() + 1}, {}});
  options.rules.push_back({TenantId{2}, {}, {::getgid()}});
  Harness h(std::move(options));
  h.store.add_tenant({.name = "other"});
  h.store.add_tenant({.name = "mine"});
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  EXPECT_STREQ(response.getInfo().getTenantName().cStr(), "mine");
}

TEST(Slabs, EachArrivesWithItsDescriptorAndIsAcknowledged) {
  Harness h({}, /*slabs_at_open=*/3);
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  auto ready = h.wait(send(response.getSession().readyRequest()));
  EXPECT_EQ(ready.getStatus().getCode(), 0);
  EXPECT_EQ(seen.maps, 3u);
  EXPECT_EQ(seen.bytes, "slab");
  EXPECT_EQ(h.store.count("mapped"), 3u);
}

TEST(Slabs, ReadyWaitsForTheLastAcknowledgement) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  seen.hold = true;
  auto response = h.register_model(client, seen);
  bool is_ready = false;
  auto ready =
      send(response.getSession().readyRequest()).then([&](auto&&) { is_ready = true; }).eagerlyEvaluate(nullptr);
  const auto before = h.store.ticks;
  h.until([&] { return h.store.ticks > before + 3 && !seen.held.empty(); });
  EXPECT_FALSE(is_ready);
  seen.held[0]->fulfill();
  h.until([&] { return is_ready; });
}

TEST(Slabs, UnmapIsAskedAndAcknowledged) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.until([&] { return h.store.count("mapped") == 1; });
  h.store.announce(h.store.live.begin()->first, 0, /*map=*/false);
  h.until([&] { return h.store.count("unmapped") == 1; });
  EXPECT_EQ(seen.unmaps, 1u);
}

TEST(Slabs, ASinkThatFailsLosesItsConnection) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  seen.fail = true;
  auto response = h.register_model(client, seen);
  h.wait(client.rpc.onDisconnect());
  h.until([&] { return h.server->connections() == 0; });
  EXPECT_EQ(h.store.count("mapped"), 0u);
}

TEST(Slabs, ASinkThatNeverAnswersLosesItsConnection) {
  RpcOptions options;
  options.acknowledge_ms = 50;
  Harness h(std::move(options));
  Client client = h.connect();
  Sink::Seen seen;
  seen.hold = true;
  auto response = h.register_model(client, seen);
  h.wait(client.rpc.onDisconnect());
  EXPECT_NE(std::find_if(h.log.begin(), h.log.end(), [](auto& l) { return l.find("slab_not_acknowledged") != l.npos; }),
            h.log.end());
}

TEST(Slabs, AnnouncedLateInASlowTickIsNotOverdue) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.until([&] { return h.store.count("mapped") == 1; });
  bool announced = false;
  h.store.on_tick = [&] {
    const auto start = h.loop.now_ms();
    while (h.loop.now_ms() < start + 3) {  // the tick's time is from before
    }
    if (!std::exchange(announced, true)) h.store.announce(h.store.live.begin()->first, 1, /*map=*/true);
  };
  h.until([&] { return h.store.count("mapped") == 2; });
  EXPECT_EQ(h.server->connections(), 1u);
}

TEST(Requests, CreditsThatAreThereAreGrantedAtOnce) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  auto request = response.getSession().creditsRequest();
  request.setPages(7);
  auto credits = h.wait(send(kj::mv(request)));
  EXPECT_EQ(credits.getStatus().getCode(), 0);
  EXPECT_EQ(credits.getGranted(), 7u);
  // The ring was taken first, so that ring and RPC keep their order.
  const auto drained = std::find(h.store.calls.begin(), h.store.calls.end(), "drain_commands");
  EXPECT_LT(drained, std::find(h.store.calls.begin(), h.store.calls.end(), "request_credits"));
}

TEST(Requests, ParkedCreditsAreGrantedWhenRoomAppears) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.room = false;
  auto request = response.getSession().creditsRequest();
  request.setPages(7);
  request.setDeadlineMs(kPatienceMs);
  auto waiting = send(kj::mv(request));
  h.until([&] { return h.store.count("request_credits") >= 3; });
  h.store.room = true;
  auto credits = h.wait(kj::mv(waiting));
  EXPECT_EQ(credits.getStatus().getCode(), 0);
  EXPECT_EQ(h.store.count("withdraw_credits"), 0u);
}

TEST(Requests, ParkedCreditsFailTypedAtTheirDeadline) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.room = false;
  auto request = response.getSession().creditsRequest();
  request.setPages(7);
  request.setDeadlineMs(40);
  const auto start = h.loop.now_ms();
  auto credits = h.wait(send(kj::mv(request)));
  EXPECT_GE(h.loop.now_ms() - start, 39u);
  EXPECT_EQ(static_cast<Errc>(credits.getStatus().getCode()), Errc::no_memory);
  EXPECT_EQ(credits.getGranted(), 0u);
  EXPECT_NE(std::string(credits.getStatus().getMessage().cStr()).find("7 pages within 40 ms"), std::string::npos);
  EXPECT_EQ(h.store.count("withdraw_credits"), 1u);
}

TEST(Requests, WhatCanNeverBeMetDoesNotWait) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.credits_error = {Errc::over_quota, 0, "more than the tenant's quota can ever hold"};
  auto request = response.getSession().creditsRequest();
  request.setPages(1000);
  request.setDeadlineMs(1000 * kPatienceMs);
  auto credits = h.wait(send(kj::mv(request)));
  EXPECT_EQ(static_cast<Errc>(credits.getStatus().getCode()), Errc::over_quota);
}

TEST(Requests, WaitingRequestsOfOneSessionAreBounded) {
  RpcOptions options;
  options.max_parked_per_session = 2;
  Harness h(std::move(options));
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.room = false;
  std::vector<kj::Promise<capnp::Response<wire::Session::ResumeResults>>> waiting;
  for (int i = 0; i < 3; ++i) {
    auto request = response.getSession().resumeRequest();
    request.setSequence(1);
    request.setDeadlineMs(kPatienceMs);
    waiting.push_back(send(kj::mv(request)));
  }
  auto third = h.wait(kj::mv(waiting[2]));
  EXPECT_EQ(static_cast<Errc>(third.getStatus().getCode()), Errc::limit_reached);
  h.store.room = true;
  EXPECT_EQ(h.wait(kj::mv(waiting[0])).getStatus().getCode(), 0);
}

TEST(Requests, AttachReturnsThePagesOrWhyNot) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  const auto ask = [&](unsigned key_bytes) {
    auto request = response.getSession().attachRequest();
    request.setPages(3);
    request.initKey(key_bytes);
    return h.wait(send(kj::mv(request)));
  };
  auto attached = ask(32);
  ASSERT_EQ(attached.getPages().size(), 3u);
  EXPECT_EQ(attached.getPages()[2], 12u);
  EXPECT_EQ(static_cast<Errc>(ask(31).getStatus().getCode()), Errc::invalid_argument);
  h.store.attach_error = {Errc::stale_id, 0, "the page has been dropped"};
  EXPECT_EQ(static_cast<Errc>(ask(32).getStatus().getCode()), Errc::stale_id);
}

int fd_of(Harness& h, wire::Memory::Client memory) {
  auto fd = h.wait(memory.getFd());
  return ::fcntl(KJ_ASSERT_NONNULL(fd), F_DUPFD_CLOEXEC, 0);
}

TEST(Bells, TheDoorbellMakesTheDaemonLook) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  const int doorbell = fd_of(h, h.wait(send(response.getSession().doorbellRequest())).getMemory());
  const auto before = h.store.count("drain_commands");
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(doorbell, &one, sizeof(one)), 8);
  h.until([&] { return h.store.count("drain_commands") > before; });
  ::close(doorbell);
}

TEST(Bells, TheNoticeRingsWhenTheSessionsWordsChange) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  const int notice = fd_of(h, h.wait(send(response.getSession().noticeRequest())).getMemory());
  std::uint64_t count = 0;
  h.until([&] { return ::read(notice, &count, sizeof(count)) == 8; });  // of the registration itself
  h.store.notices.insert(h.store.live.begin()->first);
  h.until([&] { return ::read(notice, &count, sizeof(count)) == 8; });
  ::close(notice);
}

// The client shares the eventfd's flags, so it can make it blocking and fill or empty it: the loop must not hang.
TEST(Bells, AClientThatMakesThemBlockCannotStopTheDaemon) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  const int doorbell = fd_of(h, h.wait(send(response.getSession().doorbellRequest())).getMemory());
  const int notice = fd_of(h, h.wait(send(response.getSession().noticeRequest())).getMemory());
  std::uint64_t most = UINT64_MAX - 1, count = 0;
  while (::read(notice, &count, sizeof(count)) == 8) {
  }
  ASSERT_EQ(::write(notice, &most, sizeof(most)), 8);
  ASSERT_EQ(::fcntl(doorbell, F_SETFL, 0), 0);
  ASSERT_EQ(::fcntl(notice, F_SETFL, 0), 0);
  h.store.notices.insert(h.store.live.begin()->first);
  const std::uint64_t one = 1;
  ASSERT_EQ(::write(doorbell, &one, sizeof(one)), 8);
  const auto before = h.store.ticks;
  h.until([&] { return h.store.ticks > before + 3; });
  ::close(doorbell);
  ::close(notice);
}

// The counter is filled after the daemon looked: the write blocks and is interrupted.
TEST(Bells, ABlockedWriteEnds) {
  auto io = kj::setupAsyncIo();
  Bell bell;
  const int fd = ::eventfd(0, EFD_CLOEXEC);
  std::atomic<bool> stop{false};
  std::thread toggler([&] {
    const std::uint64_t most = UINT64_MAX - 1;
    std::uint64_t count = 0;
    while (!stop) {
      ::fcntl(fd, F_SETFL, O_NONBLOCK);
      [[maybe_unused]] auto a = ::write(fd, &most, sizeof(most));
      [[maybe_unused]] auto b = ::read(fd, &count, sizeof(count));
      a = ::write(fd, &most, sizeof(most));
      ::fcntl(fd, F_SETFL, 0);
      std::this_thread::yield();
      ::fcntl(fd, F_SETFL, O_NONBLOCK);
      b = ::read(fd, &count, sizeof(count));
    }
  });
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 200; ++i) bell.ring(fd);
  stop = true;
  toggler.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(200 * 4 * Bell::kMostWaitMs));
  ::close(fd);
}

TEST(End, AClosedSocketOfALivingProcessReleasesTheSession) {
  Harness h;
  {
    Client client = h.connect();
    Sink::Seen seen;
    auto response = h.register_model(client, seen);
    EXPECT_EQ(h.server->sessions(), 1u);
  }
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.store.count("disconnect"), 1u);
  EXPECT_EQ(h.store.count("process_ended"), 1u);
  EXPECT_TRUE(h.store.live.empty());
}

TEST(End, OpenStepsOfALivingProcessAreWaitedFor) {
  Harness h;
  h.store.open_steps = 1;
  {
    Client client = h.connect();
    Sink::Seen seen;
    auto response = h.register_model(client, seen);
  }
  h.until([&] { return h.store.count("disconnect") == 1; });
  const auto before = h.store.ticks;
  h.until([&] { return h.store.ticks > before + 3; });
  EXPECT_EQ(h.store.count("process_ended"), 0u);
  h.store.open_steps = 0;
  h.until([&] { return h.server->sessions() == 0; });
}

TEST(End, DroppingTheSessionCapabilityClosesIt) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  { auto response = h.register_model(client, seen); }
  h.until([&] { return h.server->sessions() == 0; });
  EXPECT_EQ(h.server->connections(), 1u);
}

TEST(End, ParkedRequestsEndWithTheirSession) {
  Harness h;
  Client client = h.connect();
  {
    Sink::Seen seen;
    auto response = h.register_model(client, seen);
    h.store.room = false;
    auto request = response.getSession().resumeRequest();
    request.setDeadlineMs(kPatienceMs);
    auto waiting = send(kj::mv(request));
    h.until([&] { return h.store.count("resume") >= 1; });
    auto drop = kj::mv(client.stream);  // the peer vanishes
    client.node = nullptr;
    EXPECT_EQ(::shutdown(KJ_ASSERT_NONNULL(drop->getFd()), SHUT_RDWR), 0);
    h.until([&] { return h.server->connections() == 0 && h.server->sessions() == 0; });
    client.stream = kj::mv(drop);
  }
}

TEST(End, TheDaemonMayEndWhileRequestsWait) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.room = false;
  auto request = response.getSession().creditsRequest();
  request.setDeadlineMs(kPatienceMs);
  auto waiting = send(kj::mv(request));
  h.until([&] { return h.store.count("request_credits") >= 2; });
  h.server.reset();
  EXPECT_ANY_THROW(h.wait(kj::mv(waiting)));
}

TEST(End, ARequestThatItsCallerDropsIsWithdrawn) {
  Harness h;
  Client client = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(client, seen);
  h.store.room = false;
  {
    auto request = response.getSession().creditsRequest();
    request.setDeadlineMs(1000 * kPatienceMs);
    auto waiting = send(kj::mv(request));
    h.until([&] { return h.store.count("request_credits") >= 2; });
  }
  h.until([&] { return h.store.count("withdraw_credits") == 1; });
  EXPECT_EQ(h.server->sessions(), 1u);
}

TEST(Pace, NothingTicksWhenNobodyIsThere) {
  Harness h;
  h.until([&] { return h.loop.turns() > 0; });
  const auto ticks = h.store.ticks;
  h.io.provider->getTimer().afterDelay(100 * kj::MILLISECONDS).wait(h.io.waitScope);
  EXPECT_EQ(h.store.ticks, ticks);
}

}  // namespace
}  // namespace kvq

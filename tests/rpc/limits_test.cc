// Peers that are idle, endless or greedy: each meets its bound, the log says so once, and others do not notice.
#include "tests/rpc/adopted.h"
#include "tests/rpc/raw_peer.h"

namespace kvq {
namespace {

using namespace kvq::testing;
namespace rpc = capnp::rpc;

std::size_t times_logged(const Harness& h, const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(h.log.begin(), h.log.end(), [&](const std::string& line) { return line.find(text) != line.npos; }));
}

TEST(Calls, APeerThatNeverFinishesThemIsCut) {
  RpcOptions options;
  options.max_questions_per_peer = 100;
  Harness h(std::move(options));
  RawPeer peer(h.path);
  h.until([&] { return h.server->connections() == 1; });
  for (std::uint32_t i = 0; i < 100; ++i) ASSERT_TRUE(peer.bootstrap(i));
  std::size_t replies = 0;
  h.until([&] { return (replies += peer.take_replies()) > 100 * 32; });
  EXPECT_EQ(h.server->connections(), 1u);
  EXPECT_TRUE(peer.bootstrap(100));
  h.until([&] { return h.server->connections() == 0; });
  EXPECT_EQ(times_logged(h, "event=refused cause=unfinished_calls"), 1u);
}

TEST(Calls, WhatIsFinishedCountsNoMore) {
  RpcOptions options;
  options.max_questions_per_peer = 8;
  Harness h(std::move(options));
  RawPeer peer(h.path);
  h.until([&] { return h.server->connections() == 1; });
  std::size_t replies = 0;
  for (std::uint32_t i = 0; i < 200; ++i) {
    ASSERT_TRUE(peer.bootstrap(i));
    h.until([&] { return (replies += peer.take_replies()) > i * 32; });
    ASSERT_TRUE(peer.finish(i));
  }
  EXPECT_EQ(h.server->connections(), 1u);
}

// Each of these would make the RPC system keep something that no kvq client needs.
TEST(Messages, KindsThatNoClientNeedsEndTheConnection) {
  using Fill = std::function<void(rpc::Message::Builder)>;
  const std::vector<std::pair<const char*, Fill>> messages = {
      {"message_kind", [](auto m) { m.initProvide().setQuestionId(1); }},
      {"message_kind", [](auto m) { m.initAccept().setQuestionId(1); }},
      {"message_kind", [](auto m) { m.initJoin().setQuestionId(1); }},
      {"message_kind", [](auto m) { m.initDisembargo().getContext().setSenderLoopback(1); }},
      {"message_kind", [](auto m) { m.initResolve().initCap().setSenderHosted(7); }},
      {"message_kind",
       [](auto m) {
         m.getObsoleteSave();
         m.initObsoleteSave();
       }},
      {"message_kind", [](auto m) { m.initObsoleteDelete(); }},
      {"results_elsewhere", [](auto m) { init_call(m, 1, 0, 1).getSendResultsTo().setYourself(); }},
      {"results_elsewhere", [](auto m) { m.initReturn().setTakeFromOtherQuestion(0); }},
      {"capabilities", [](auto m) { init_call(m, 1, 0, 1).initParams().initCapTable(5); }},
      {"capabilities", [](auto m) { m.initReturn().initResults().initCapTable(100); }},
      {"capability_kind", [](auto m) { init_call(m, 1, 0, 1).initParams().initCapTable(1)[0].setSenderPromise(1); }},
      {"capability_kind", [](auto m) { init_call(m, 1, 0, 1).initParams().initCapTable(1)[0].setReceiverHosted(0); }},
      {"capability_kind",
       [](auto m) { init_call(m, 1, 0, 1).initParams().initCapTable(1)[0].initThirdPartyHosted(); }}};
  for (std::size_t i = 0; i < messages.size(); ++i) {
    SCOPED_TRACE("message " + std::to_string(i));
    Harness h;
    RawPeer peer(h.path);
    EXPECT_TRUE(peer.bootstrap(0));
    h.until([&] { return h.server->connections() == 1 && peer.take_replies() > 0; });
    EXPECT_TRUE(peer.send(messages[i].second));
    h.until([&] { return h.server->connections() == 0; });
    EXPECT_EQ(times_logged(h, std::string("event=refused cause=") + messages[i].first), 1u);
  }
}

TEST(Deadlines, AMessageThatStopsInTheMiddleIsNotWaitedForLong) {
  RpcOptions options;
  options.read_deadline_ms = 100;
  Harness h(std::move(options));
  capnp::MallocMessageBuilder message;
  message.initRoot<rpc::Message>().initBootstrap();
  const auto words = capnp::messageToFlatArray(message);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{8}, words.asBytes().size() - 1}) {
    SCOPED_TRACE(std::to_string(bytes) + " bytes");
    h.log.clear();
    RawPeer peer(h.path);
    h.until([&] { return h.server->connections() == 1; });
    const auto start = h.loop.now_ms();
    ASSERT_TRUE(peer.send(words.asBytes().begin(), bytes));
    h.until([&] { return h.server->connections() == 0; });
    EXPECT_GE(h.loop.now_ms() - start, 100u);
    EXPECT_EQ(times_logged(h, "event=message_not_finished action=disconnect"), 1u);
  }
}

// A byte now and then does not prolong it: the deadline is the message's.
TEST(Deadlines, ADrippingPeerIsCutToo) {
  RpcOptions options;
  options.read_deadline_ms = 100;
  Harness h(std::move(options));
  capnp::MallocMessageBuilder message;
  message.initRoot<rpc::Message>().initBootstrap().initDeprecatedObjectId().setAs<capnp::Text>(
      std::string(4000, 'x').c_str());
  const auto words = capnp::messageToFlatArray(message);
  RawPeer peer(h.path);
  h.until([&] { return h.server->connections() == 1; });
  std::size_t sent = 0;
  h.until([&] {
    if (sent < words.asBytes().size() && peer.send(words.asBytes().begin() + sent, 1)) ++sent;
    return h.server->connections() == 0;
  });
  EXPECT_LT(sent, words.asBytes().size());
  EXPECT_EQ(times_logged(h, "event=message_not_finished"), 1u);
}

TEST(Deadlines, BetweenMessagesAnOwnerMayBeSilent) {
  RpcOptions options;
  options.admin_uids = {::getuid()};
  options.read_deadline_ms = options.idle_ms = 100;
  Harness h(std::move(options));
  Client server = h.connect(), operator_client = h.connect(), nobody = h.connect();
  Sink::Seen seen;
  auto response = h.register_model(server, seen);
  auto admin = h.wait(send(operator_client.node.adminRequest())).getAdmin();
  h.wait(send(nobody.node.registerRequest()));  // refused: it owns nothing
  h.until([&] { return h.server->connections() == 3; });
  h.until([&] { return h.server->connections() == 2; });
  EXPECT_EQ(times_logged(h, "event=idle action=disconnect"), 1u);
  const auto start = h.loop.now_ms();
  h.until([&] { return h.loop.now_ms() > start + 300; });
  EXPECT_EQ(h.server->connections(), 2u);
  // Who gives up what it owned has the same time again.
  const auto given_up_ms = h.loop.now_ms();
  admin = nullptr;
  h.until([&] { return h.server->connections() == 1; });
  EXPECT_GE(h.loop.now_ms() - given_up_ms, 75u);
}

TEST(Bounds, AdminCapabilitiesOfOneConnection) {
  RpcOptions options;
  options.admin_uids = {::getuid()};
  options.max_admins_per_peer = 2;
  Harness h(std::move(options));
  Client client = h.connect();
  const auto ask = [&] { return h.wait(send(client.node.adminRequest())); };
  auto one = ask(), two = ask();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(static_cast<Errc>(ask().getStatus().getCode()), Errc::limit_reached);
  }
  EXPECT_EQ(times_logged(h, "event=refused cause=admins_of_connection limit=2"), 1u);
  { auto gone = kj::mv(two); }
  h.until([&] { return ask().getStatus().getCode() == 0; });
}

TEST(Bounds, SessionsOfOneProcessCountOverItsConnections) {
  RpcOptions options;
  options.max_sessions_per_peer = 2;
  Harness h(std::move(options));
  Client one = h.connect(), two = h.connect();
  Sink::Seen seen;
  auto first = h.register_model(one, seen), second = h.register_model(two, seen);
  for (int i = 0; i < 3; ++i) {
    auto request = two.node.registerRequest();
    fill(request.initRequest(), kj::heap<Sink>(seen));
    EXPECT_EQ(static_cast<Errc>(h.wait(send(kj::mv(request))).getStatus().getCode()), Errc::limit_reached);
  }
  EXPECT_EQ(times_logged(h, "event=refused cause=sessions_of_process limit=2"), 1u);
  EXPECT_EQ(h.store.live.size(), 2u);
}

TEST(Bounds, ARefusalOfTheStoreIsLoggedOnce) {
  Harness h;
  h.store.open_error = {Errc::limit_reached, 0, "max_sessions are open"};
  Client client = h.connect();
  Sink::Seen seen;
  for (int i = 0; i < 3; ++i) {
    auto request = client.node.registerRequest();
    fill(request.initRequest(), kj::heap<Sink>(seen));
    EXPECT_EQ(static_cast<Errc>(h.wait(send(kj::mv(request))).getStatus().getCode()), Errc::limit_reached);
  }
  EXPECT_EQ(times_logged(h, "event=refused cause=sessions_in_all"), 1u);
}

// A process of another user, so that root's own rights do not hide the bound.
TEST(Bounds, ConnectionsOfOneUser) {
  int wire[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, wire), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    char path[128] = {};
    if (::read(wire[1], path, sizeof(path) - 1) <= 0 || (::getuid() == 0 && ::setresuid(4242, 4242, 4242) != 0))
      ::_exit(1);
    for (int i = 0; i < 20; ++i) connect_to(path);
    for (;;) ::pause();
  }
  RpcOptions options;
  options.max_connections = 48;  // a quarter of them for each
  Harness h(std::move(options));
  ASSERT_EQ(::write(wire[0], h.path.data(), h.path.size()), static_cast<ssize_t>(h.path.size()));
  h.until([&] { return times_logged(h, "event=connection_refused uid=") == 8; });
  EXPECT_EQ(h.server->connections(), 12u);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  h.until([&] { return h.server->connections() == 0; });
  ::close(wire[0]);
  ::close(wire[1]);
}

TEST(Descriptors, NobodyAskedForAreNotTaken) {
  Harness h;
  RawPeer peer(h.path);
  capnp::MallocMessageBuilder message;
  message.initRoot<rpc::Message>().initBootstrap();
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = words.asBytes();
  const int gift = ::memfd_create("gift", MFD_CLOEXEC);
  h.until([&] { return h.server->connections() == 1; });
  const auto before = open_descriptors();
  // With the first byte, and the message is not whole: nothing holds it meanwhile.
  ASSERT_TRUE(peer.send_with_descriptor(bytes.begin(), 8, gift));
  h.io.provider->getTimer().afterDelay(50 * kj::MILLISECONDS).wait(h.io.waitScope);
  EXPECT_EQ(open_descriptors(), before);
  // In the middle of it and at its end; then the message is answered as if nothing was there.
  ASSERT_TRUE(peer.send_with_descriptor(bytes.begin() + 8, 9, gift));
  ASSERT_TRUE(peer.send_with_descriptor(bytes.begin() + 17, bytes.size() - 17, gift));
  h.until([&] { return peer.take_replies() > 0; });
  EXPECT_EQ(open_descriptors(), before);
  ::close(gift);
}

}  // namespace
}  // namespace kvq

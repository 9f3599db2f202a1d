// Bytes that no kvq client would send, by kind: each is answered with an error or ends its connection, and nobody else
// notices.
#include <random>

#include "tests/rpc/harness.h"
#include "tests/rpc/raw_peer.h"
#include "tests/support/seed.h"

namespace kvq {
namespace {

using namespace kvq::testing;
namespace rpc = capnp::rpc;

// A node with a good client, who must not notice anything of what a test does.
class Babble : public ::testing::Test {
 protected:
  struct Node {
    Harness h;
    Client good = h.connect();
    Sink::Seen seen;
    capnp::Response<wire::Node::RegisterResults> response = h.register_model(good, seen);
  };

  void TearDown() override {
    EXPECT_EQ(h.wait(send(node_->response.getSession().readyRequest())).getStatus().getCode(), 0);
    until_cut();
    h.until([&] { return h.server->sessions() == 1; });
  }
  // Before a peer says anything, so that its end is not taken for the time before it came.
  void until_accepted() {
    h.until([&] { return h.server->connections() == 2; });
  }
  void until_cut() {
    h.until([&] { return h.server->connections() == 1; });
  }

  std::unique_ptr<Node> node_ = std::make_unique<Node>();
  Harness& h = node_->h;
};

std::vector<kj::byte> bytes_of(const std::function<void(rpc::Message::Builder)>& fill) {
  capnp::MallocMessageBuilder message;
  fill(message.initRoot<rpc::Message>());
  const auto words = capnp::messageToFlatArray(message);
  return {words.asBytes().begin(), words.asBytes().end()};
}

TEST_F(Babble, GarbageEndsTheConnectionAndNothingElse) {
  const std::vector<std::vector<std::uint32_t>> messages = {
      {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu},  // four thousand million segments
      {0u, 0x0fffffffu},                                     // one segment of 2 GiB
      {511u, 0x7fffffffu},                                   // 512 segments
      {0u, 1u, 0xdeadbeefu, 0xdeadbeefu},                    // wild pointer
      {0u, 1u, 0xfffffffcu, 0x00010000u},                    // a pointer to itself
      {0u, 1u, 2u, 0xffffu},                                 // a far pointer to a segment that is none
      {0u, 0u},                                              // no root
      {511u, 0u, 0u, 0u},                                    // the end is missing
  };
  for (const auto& words : messages) {
    RawPeer peer(h.path);
    until_accepted();
    EXPECT_TRUE(peer.send(words.data(), words.size() * sizeof(words[0])));
    peer.end_of_input();
    until_cut();
  }
}

TEST_F(Babble, AMessageLargerThanAnyRequestIsNotBuffered) {
  RawPeer peer(h.path);
  h.until([&] { return h.server->connections() == 2; });
  const std::uint32_t header[] = {0, 129 * 1024};  // words: more than the limit, and never sent
  EXPECT_TRUE(peer.send(header, sizeof(header)));
  until_cut();
}

TEST_F(Babble, AHugeFieldIsCutShort) {
  Client client = h.connect();
  Sink::Seen seen;
  auto request = client.node.registerRequest();
  fill(request.initRequest(), kj::heap<Sink>(seen));
  request.getRequest().setLabel(std::string(400'000, 'x').c_str());
  auto answer = h.wait(send(kj::mv(request)));
  EXPECT_EQ(answer.getStatus().getCode(), 0);
  EXPECT_EQ(h.store.live.rbegin()->second.request.label, std::string(64, 'x'));
}

TEST_F(Babble, AMessageThatStopsAnywhereIsNone) {
  const auto bytes = bytes_of([](auto m) { init_registration(m, 1); });
  for (std::size_t length = 1; length < bytes.size(); length += 3) {
    RawPeer peer(h.path);
    until_accepted();
    ASSERT_TRUE(peer.bootstrap(0));
    ASSERT_TRUE(peer.send(bytes.data(), length));
    peer.end_of_input();
    until_cut();
  }
  EXPECT_EQ(h.store.live.size(), 1u);
  RawPeer whole(h.path);  // the same bytes, all of them, are a registration
  until_accepted();
  ASSERT_TRUE(whole.bootstrap(0));
  ASSERT_TRUE(whole.send(bytes.data(), bytes.size()));
  h.until([&] { return h.store.live.size() == 2; });
}

TEST_F(Babble, DeepNestingIsNotFollowed) {
  RawPeer peer(h.path);
  until_accepted();
  ASSERT_TRUE(peer.bootstrap(0));
  ASSERT_TRUE(peer.send([](rpc::Message::Builder m) {
    for (int i = 0; i < 5000; ++i) m = m.initUnimplemented();
    m.initBootstrap();
  }));
  ASSERT_TRUE(peer.send([](rpc::Message::Builder m) {
    auto inner = init_call(m, 1, 0, 0).initParams().getContent();
    for (int i = 0; i < 5000; ++i) inner = inner.initAsAnyStruct(0, 1).getPointerSection()[0];
  }));
  h.until([&] { return peer.take_replies() > 0; });
}

TEST_F(Babble, AReplayedMessageEndsTheConnection) {
  RawPeer peer(h.path);
  until_accepted();
  const auto registration = bytes_of([](auto m) { init_registration(m, 1); });
  ASSERT_TRUE(peer.bootstrap(0));
  ASSERT_TRUE(peer.send(registration.data(), registration.size()));
  h.until([&] { return h.store.live.size() == 2; });
  EXPECT_TRUE(peer.send(registration.data(), registration.size()));
  until_cut();
  h.until([&] { return h.store.live.size() == 1; });
}

TEST_F(Babble, WhatIsFinishedTwiceOrReturnedUnaskedEndsTheConnection) {
  const std::vector<std::function<void(rpc::Message::Builder)>> messages = {
      [](auto m) { m.initFinish().setQuestionId(77); }, [](auto m) { m.initReturn().setAnswerId(77); },
      [](auto m) { m.initRelease().setId(77); },
      [](auto m) {
        auto call = m.initCall();
        call.initTarget().setImportedCap(77);
      }};
  for (const auto& fill : messages) {
    RawPeer peer(h.path);
    until_accepted();
    ASSERT_TRUE(peer.bootstrap(0));
    ASSERT_TRUE(peer.send(fill));
    h.until([&] { return peer.take_replies() > 0; });
    peer.end_of_input();
    until_cut();
  }
}

TEST_F(Babble, AnotherVersionIsToldSo) {
  RawPeer peer(h.path);
  until_accepted();
  ASSERT_TRUE(peer.bootstrap(0));
  ASSERT_TRUE(peer.send([](auto m) { init_registration(m, 1, [](auto r) { r.setContractVersion(0xffffffff); }); }));
  ASSERT_TRUE(peer.send([](auto m) { init_call(m, 2, 0, /*method=*/999); }));
  ASSERT_TRUE(peer.send([](auto m) { init_call(m, 3, 0, 0).setInterfaceId(0xdead); }));
  std::size_t replies = 0;
  h.until([&] { return (replies += peer.take_replies()) > 300; });
  EXPECT_EQ(h.server->connections(), 2u);  // a peer that asks for what does not exist may go on
  EXPECT_EQ(h.store.live.size(), 1u);
}

TEST_F(Babble, FlippedBitsNeverCrash) {
  const auto seed = test_seed(20'261'129);
  RecordProperty("seed", std::to_string(seed));
  SCOPED_TRACE("KVQ_TEST_SEED=" + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto original = bytes_of([](auto m) { init_registration(m, 1); });
  for (int round = 0; round < 400; ++round) {
    auto bytes = original;
    const auto flips = 1 + random() % 8;
    for (std::uint64_t i = 0; i < flips; ++i) bytes[random() % bytes.size()] ^= 1u << (random() % 8);
    RawPeer peer(h.path);
    until_accepted();
    ASSERT_TRUE(peer.bootstrap(0));
    ASSERT_TRUE(peer.send(bytes.data(), bytes.size()));
    peer.end_of_input();
    until_cut();
  }
}

}  // namespace
}  // namespace kvq

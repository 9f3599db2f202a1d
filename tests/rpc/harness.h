// A server on a real Unix socket and its clients, all on one loop.
//
// Invariant: nothing here sleeps: waits end with an event, or with a failed test after kPatienceMs.
#pragma once

#include <capnp/rpc-twoparty.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <kj/async-io.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "daemon/rpc/rpc.h"
#include "kvq/protocol.capnp.h"
#include "tests/rpc/fake_store.h"

namespace kvq::testing {

constexpr int kPatienceMs = 10'000;

inline sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

inline int connect_to(const std::string& path) {
  const sockaddr_un address = address_of(path);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0) << std::strerror(errno);
  return fd;
}

// Takes slabs as told.
class Sink final : public wire::SlabSink::Server {
 public:
  struct Seen {
    std::uint32_t maps = 0, unmaps = 0;
    std::string bytes;  // of the last slab's memory
    bool hold = false;  // do not answer
    bool fail = false;
    std::vector<kj::Own<kj::PromiseFulfiller<void>>> held;
    std::vector<wire::Memory::Client> memory;
  };
  explicit Sink(Seen& seen) : seen_(seen) {}
  kj::Promise<void> map(MapContext context) override {
    ++seen_.maps;
    KJ_REQUIRE(!seen_.fail, "this sink fails");
    seen_.memory.push_back(context.getParams().getMemory());
    return seen_.memory.back().getFd().then([this](kj::Maybe<int> fd) -> kj::Promise<void> {
      char bytes[5] = {};
      KJ_IF_MAYBE (number, fd) {
        EXPECT_EQ(::pread(*number, bytes, 4, 0), 4);
      }
      seen_.bytes = bytes;
      if (!seen_.hold) return kj::READY_NOW;
      auto pair = kj::newPromiseAndFulfiller<void>();
      seen_.held.push_back(kj::mv(pair.fulfiller));
      return kj::mv(pair.promise);
    });
  }
  kj::Promise<void> unmap(UnmapContext) override {
    ++seen_.unmaps;
    return kj::READY_NOW;
  }

 private:
  Seen& seen_;
};

struct Client {
  Client(kj::LowLevelAsyncIoProvider& io, const std::string& path)
      : stream(io.wrapUnixSocketFd(connect_to(path), kj::LowLevelAsyncIoProvider::TAKE_OWNERSHIP)),
        rpc(*stream, /*maxFdsPerMessage=*/1),
        node(rpc.bootstrap().castAs<wire::Node>()) {}

  kj::Own<kj::AsyncCapabilityStream> stream;
  capnp::TwoPartyClient rpc;
  wire::Node::Client node;
};

// A valid registration; tests spoil it.
inline void fill(wire::Registration::Builder r, wire::SlabSink::Client sink) {
  r.setContractVersion(kContractVersion);
  r.setLabel("test server");
  auto layers = r.initLayers(2);
  for (auto layer : layers) {
    layer.setKvHeads(2);
    layer.setHeadDim(64);
  }
  const std::uint8_t fingerprint[32] = {7};
  r.setFingerprint(kj::arrayPtr(fingerprint, 32));
  r.setPageTokens(kPageTokens);
  r.setCredits(4);
  r.setSlabs(kj::mv(sink));
}

class Harness {
 public:
  // `before` fills the store before the server is made. `others`: further devices, by their names.
  explicit Harness(
      RpcOptions options = {}, std::uint32_t slabs_at_open = 1,
      const std::function<void(FakeStore&)>& before = [](auto&) {}, const std::vector<std::string>& others = {})
      : store(slabs_at_open) {
    char name[] = "/tmp/kvq-rpc-XXXXXX";
    directory_ = ::mkdtemp(name);
    path = directory_ + "/kvqd.sock";
    const sockaddr_un address = address_of(path);
    listening_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::bind(listening_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::chmod(path.c_str(), 0777), 0);
    EXPECT_EQ(::chmod(directory_.c_str(), 0755), 0);
    EXPECT_EQ(::listen(listening_, 128), 0);
    if (!options.unlisted && options.rules.empty()) options.unlisted = TenantSpec{};
    options.make_salt = [] { return std::array<std::uint8_t, 32>{1, 2, 3}; };
    options.range_bytes = 64 << 20;
    options.slab_bytes = 1 << 20;
    options.device = "host";
    before(store);
    options.log = [this](const std::string& line) { log.push_back(line); };
    std::vector<RpcPart> parts;
    parts.push_back({store, options});
    for (const std::string& name : others) {
      auto& other = more.emplace_back(std::make_unique<FakeStore>(slabs_at_open));
      const std::size_t part = more.size();
      other->count_from(static_cast<std::uint32_t>(part) * kSessionsOfRange);
      other->deliver = [this, part](const SlabNotice& notice) { server->deliver(notice, part); };
      parts.push_back({*other, options});
      parts.back().options.served_as = name;
    }
    server = serve(loop, *io.lowLevelProvider, std::move(parts), listening_);
    store.deliver = [this](const SlabNotice& notice) { server->deliver(notice); };
  }
  ~Harness() {
    server.reset();
    ::close(listening_);
    std::filesystem::remove_all(directory_);
  }

  bool logged(const std::string& text) const {
    return std::any_of(log.begin(), log.end(), [&](const std::string& line) { return line.find(text) != line.npos; });
  }

  Client connect() { return Client(*io.lowLevelProvider, path); }

  template <typename T>
  T wait(kj::Promise<T> promise) {
    auto late = io.provider->getTimer().afterDelay(kPatienceMs * kj::MILLISECONDS).then([]() -> kj::Promise<T> {
      return KJ_EXCEPTION(FAILED, "the test waited too long");
    });
    return promise.exclusiveJoin(kj::mv(late)).wait(io.waitScope);
  }

  // Turns the loop until `condition` holds.
  template <typename Condition>
  void until(Condition condition) {
    const auto start = loop.now_ms();
    while (!condition()) {
      ASSERT_LT(loop.now_ms() - start, static_cast<std::uint64_t>(kPatienceMs)) << "the condition never came true";
      io.provider->getTimer().afterDelay(1 * kj::MILLISECONDS).wait(io.waitScope);
    }
  }

  auto register_model(Client& client, Sink::Seen& seen) {
    auto request = client.node.registerRequest();
    fill(request.initRequest(), kj::heap<Sink>(seen));
    auto response = wait(kj::Promise<capnp::Response<wire::Node::RegisterResults>>(request.send()));
    EXPECT_EQ(response.getStatus().getCode(), 0) << response.getStatus().getMessage().cStr();
    return response;
  }

  kj::AsyncIoContext io = kj::setupAsyncIo();
  EventLoop loop{io};
  FakeStore store;
  std::vector<std::unique_ptr<FakeStore>> more;  // of the other devices
  std::string path;
  std::vector<std::string> log;
  std::unique_ptr<RpcServer> server;

 private:
  std::string directory_;
  int listening_ = -1;
};

template <typename Params, typename Results>
kj::Promise<capnp::Response<Results>> send(capnp::Request<Params, Results>&& request) {
  return request.send();
}

}  // namespace kvq::testing

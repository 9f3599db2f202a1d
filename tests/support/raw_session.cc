// Invariant: as in wire.h of the client: Cap'n Proto objects live and die on the loop thread.
#include "tests/support/raw_session.h"

#include <capnp/rpc-twoparty.h>
#include <fcntl.h>
#include <kj/debug.h>
#include <kj/io.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "client/last_error.h"
#include "kvq/protocol.capnp.h"
#include "tests/support/tiny_model.h"

namespace kvq::test {
namespace {

using client::Reply;

kj::Promise<int> duplicate_of(wire::Memory::Client memory) {
  auto found = memory.getFd();
  return found.then([memory = kj::mv(memory)](kj::Maybe<int> fd) mutable {
    return ::fcntl(KJ_REQUIRE_NONNULL(fd), F_DUPFD_CLOEXEC, 3);
  });
}

class Sink final : public wire::SlabSink::Server {
 public:
  Sink(std::map<std::uint32_t, RawSession::Slab>& slabs, bool answers) : slabs_(slabs), answers_(answers) {}
  kj::Promise<void> map(MapContext context) override {
    if (!answers_) return kj::NEVER_DONE;
    return duplicate_of(context.getParams().getMemory()).then([this, context](int fd) mutable {
      slabs_[context.getParams().getSlab()] = {fd, context.getParams().getWritable()};
    });
  }
  kj::Promise<void> unmap(UnmapContext context) override {
    slabs_.erase(context.getParams().getSlab());
    return kj::READY_NOW;
  }

 private:
  std::map<std::uint32_t, RawSession::Slab>& slabs_;
  const bool answers_;
};

}  // namespace

struct RawSession::Wire {
  Wire(kj::Own<kj::AsyncCapabilityStream> s)
      : stream(kj::mv(s)), peer(*stream, 1), node(peer.bootstrap().castAs<wire::Node>()) {}
  std::map<std::uint32_t, Slab> slabs;
  std::vector<int> fds;
  kj::Own<kj::AsyncCapabilityStream> stream;
  capnp::TwoPartyClient peer;
  wire::Node::Client node;
  kj::Maybe<wire::Session::Client> session;
};

RawSession::RawSession(const std::string& socket, bool answers) : answers_(answers) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket.c_str(), sizeof(address.sun_path) - 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0)
    throw std::runtime_error("connect " + socket);
  loop_.run(
      [&](kj::AsyncIoContext& io) -> kj::Promise<Reply> {
        wire_ = std::make_unique<Wire>(
            io.lowLevelProvider->wrapUnixSocketFd(kj::AutoCloseFd(fd), kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC));
        return Reply{};
      },
      20'000, {});
}

RawSession::~RawSession() {
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        for (const int fd : wire_->fds) ::close(fd);
        for (const auto& [id, slab] : wire_->slabs) ::close(slab.fd);
        wire_.reset();
        return Reply{};
      },
      20'000, {});
}

int RawSession::register_model(std::uint32_t contract_version, std::string* message) {
  const int code = do_register(contract_version, 0, nullptr, message);
  if (code < 0) throw std::runtime_error(client::last_error());
  return code;
}

int RawSession::resume_session(std::uint32_t session, const std::array<std::uint8_t, 16>& token, std::string* message) {
  return do_register(kContractVersion, session, token.data(), message);
}

int RawSession::do_register(std::uint32_t contract_version, std::uint32_t resume, const std::uint8_t* token,
                            std::string* message) {
  int code = -1;
  const kvq_status done = loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = wire_->node.registerRequest();
        auto request = call.initRequest();
        request.setContractVersion(contract_version);
        request.setLabel("raw");
        auto layers = request.initLayers(kLayers);
        for (auto layer : layers) {
          layer.setKvHeads(kKvHeads);
          layer.setHeadDim(kHeadDim);
        }
        request.setFingerprint(kj::arrayPtr(
            reinterpret_cast<const kj::byte*>("\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1\1"), 32));
        request.setPageTokens(kPageTokens);
        request.setCredits(1);
        request.setSlabs(kj::heap<Sink>(wire_->slabs, answers_));
        if (token != nullptr) {
          request.setResumeSession(resume);
          request.setResumeToken(kj::arrayPtr(token, 16));
        }
        return call.send().then([&](auto&& response) -> kj::Promise<Reply> {
          code = response.getStatus().getCode();
          if (message != nullptr) *message = response.getStatus().getMessage().cStr();
          if (code != 0) return Reply{};
          wire_->session = response.getSession();
          if (!answers_) return Reply{};  // it would never be ready
          return response.getSession().readyRequest().send().then([](auto&&) { return Reply{}; });
        });
      },
      20'000, {KVQ_ERR_NO_DAEMON, "no answer to the registration"});
  return done == KVQ_OK ? code : -1;
}

int RawSession::credits(std::uint32_t pages, std::uint32_t deadline_ms) {
  int code = -1;
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = KJ_REQUIRE_NONNULL(wire_->session).creditsRequest();
        call.setPages(pages);
        call.setDeadlineMs(deadline_ms);
        return call.send().then([&](auto&& response) {
          code = response.getStatus().getCode();
          return Reply{};
        });
      },
      20'000, {});
  return code;
}

int RawSession::attach(std::uint32_t sequence, std::uint32_t page, std::uint16_t generation, std::uint32_t pages,
                       const std::array<std::uint8_t, 32>& key) {
  int code = -1;
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto call = KJ_REQUIRE_NONNULL(wire_->session).attachRequest();
        call.setSequence(sequence);
        call.setLastPage(page);
        call.setGeneration(generation);
        call.setPages(pages);
        call.setKey(kj::arrayPtr(key.data(), key.size()));
        return call.send().then([&](auto&& response) {
          code = response.getStatus().getCode();
          return Reply{};
        });
      },
      20'000, {});
  return code;
}

int RawSession::descriptor(const std::string& name) {
  int number = -1;
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto& session = KJ_REQUIRE_NONNULL(wire_->session);
        auto memory = name == "directory"     ? session.directoryRequest().send().getMemory()
                      : name == "prefixTable" ? session.prefixTableRequest().send().getMemory()
                      : name == "doorbell"    ? session.doorbellRequest().send().getMemory()
                      : name == "notice"      ? session.noticeRequest().send().getMemory()
                                              : session.segmentRequest().send().getMemory();
        return duplicate_of(kj::mv(memory)).then([&](int fd) {
          number = fd;
          wire_->fds.push_back(fd);
          return Reply{};
        });
      },
      20'000, {});
  return number;
}

std::map<std::uint32_t, RawSession::Slab> RawSession::slabs() {
  std::map<std::uint32_t, Slab> copy;
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        copy = wire_->slabs;
        return Reply{};
      },
      20'000, {});
  return copy;
}

std::string RawSession::quantize() {
  std::string json;
  const kvq_status done = loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto admin = wire_->node.adminRequest().send().getAdmin();
        auto call = admin.quantizeRequest();
        return call.send().then([&](auto&& response) {
          json = response.getJson().cStr();
          return Reply{static_cast<kvq_status>(response.getStatus().getCode()),
                       response.getStatus().getMessage().cStr()};
        });
      },
      20'000, {KVQ_ERR_NO_DAEMON, "no answer"});
  if (done != KVQ_OK) throw std::runtime_error(client::last_error());
  return json;
}

void RawSession::set(const std::string& key, const std::string& value) {
  const kvq_status done = loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto admin = wire_->node.adminRequest().send().getAdmin();
        auto call = admin.setRequest();
        call.setKey(key);
        call.setValue(value);
        return call.send().then([](auto&& response) {
          return Reply{static_cast<kvq_status>(response.getStatus().getCode()),
                       response.getStatus().getMessage().cStr()};
        });
      },
      20'000, {KVQ_ERR_NO_DAEMON, "no answer"});
  if (done != KVQ_OK) throw std::runtime_error(client::last_error());
}

void RawSession::resize(std::uint64_t arena_bytes) {
  const kvq_status done = loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto admin = wire_->node.adminRequest().send().getAdmin();
        auto call = admin.resizeRequest();
        call.setArenaBytes(arena_bytes);
        return call.send().then([](auto&& response) {
          return Reply{static_cast<kvq_status>(response.getStatus().getCode()),
                       response.getStatus().getMessage().cStr()};
        });
      },
      20'000, {KVQ_ERR_NO_DAEMON, "no answer"});
  if (done != KVQ_OK) throw std::runtime_error(client::last_error());
}

void RawSession::verify() {
  const kvq_status done = loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto admin = wire_->node.adminRequest().send().getAdmin();
        auto call = admin.verifyRequest();
        call.setDeadlineMs(20'000);
        return call.send().then([](auto&& response) {
          return Reply{static_cast<kvq_status>(response.getStatus().getCode()),
                       response.getStatus().getMessage().cStr()};
        });
      },
      30'000, {KVQ_ERR_NO_DAEMON, "no answer"});
  if (done != KVQ_OK) throw std::runtime_error(client::last_error());
}

std::string RawSession::status() {
  std::string json;
  loop_.run(
      [&](kj::AsyncIoContext&) -> kj::Promise<Reply> {
        auto admin = wire_->node.adminRequest().send().getAdmin();
        return admin.statusRequest().send().then([&](auto&& response) {
          json = response.getJson().cStr();
          return Reply{};
        });
      },
      20'000, {});
  return json;
}

}  // namespace kvq::test

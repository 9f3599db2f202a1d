// Connects, asks for Admin, calls; each wait has a deadline.
#include "tools/kvqctl/admin_client.h"

#include <capnp/message.h>
#include <capnp/rpc-twoparty.h>
#include <kj/io.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kvq/protocol.capnp.h"

namespace kvqctl {
namespace {

// The daemon's documents may be large (pages): more than a request ever is.
capnp::ReaderOptions large_replies() {
  capnp::ReaderOptions options;
  options.traversalLimitInWords = 64 << 20;
  return options;
}

// A daemon that is stopped accepts nobody: past `answer_ms` in its full backlog, nothing answers.
kj::AutoCloseFd connect_to(const std::string& path, std::uint64_t answer_ms) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw Failure(kUsage, "the socket path " + path + " is longer than " +
                              std::to_string(sizeof(address.sun_path) - 1) + " bytes; use a shorter one");
  }
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  kj::AutoCloseFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd < 0) throw Failure(kRefused, std::string("cannot create a socket: ") + std::strerror(errno));
  const timeval most{static_cast<time_t>(answer_ms / 1000), static_cast<suseconds_t>(answer_ms % 1000 * 1000)};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof(most));
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  const int error = errno;
  if (error == EACCES || error == EPERM) {
    throw Failure(kRefused, "not allowed to connect to " + path + "; run as root or as a member of the socket's group");
  }
  throw Failure(kNoDaemon, "no daemon at " + path + " (" + std::strerror(error) +
                               "); start kvqd, or name its socket with --socket or KVQ_SOCKET");
}

}  // namespace

struct AdminClient::Wire {
  Wire(kj::AutoCloseFd fd, std::uint64_t answer)
      : answer_ms(answer),
        io(kj::setupAsyncIo()),
        stream(io.lowLevelProvider->wrapSocketFd(kj::mv(fd), kj::LowLevelAsyncIoProvider::ALREADY_CLOEXEC)),
        network(*stream, capnp::rpc::twoparty::Side::CLIENT, large_replies()),
        system(capnp::makeRpcClient(network)) {}

  template <typename T>
  auto wait(kj::Promise<T> promise, std::uint64_t deadline_ms) {
    auto late =
        io.provider->getTimer().afterDelay(deadline_ms * kj::MILLISECONDS).then([deadline_ms]() -> kj::Promise<T> {
          return KJ_EXCEPTION(OVERLOADED, "no answer in time", deadline_ms);
        });
    try {
      return promise.exclusiveJoin(kj::mv(late)).wait(io.waitScope);
    } catch (const kj::Exception& exception) {
      if (exception.getType() == kj::Exception::Type::OVERLOADED) {
        throw Failure(kNoDaemon, "kvqd has not answered within " + std::to_string(deadline_ms / 1000) + " s");
      }
      if (exception.getType() == kj::Exception::Type::UNIMPLEMENTED) {
        throw Failure(kRefused, "this kvqd does not know that; install kvqd and kvqctl of one release");
      }
      throw Failure(kNoDaemon,
                    "the connection broke: kvqd has ended, or refused the connection because it has too many");
    }
  }

  template <typename Params, typename Results>
  auto send(capnp::Request<Params, Results>&& request, std::uint64_t more_ms = 0) {
    using Response = capnp::Response<Results>;
    return wait<Response>(kj::Promise<Response>(request.send()), answer_ms + more_ms);
  }

  static void require_ok(kvq::wire::Status::Reader status) {
    if (status.getCode() != 0) throw Failure(kRefused, status.getMessage().cStr());
  }

  // The document that a call answers. Throws Failure with the daemon's words when it says no.
  template <typename Params, typename Results>
  std::string document(capnp::Request<Params, Results>&& request, std::uint64_t more_ms = 0) {
    auto response = send(kj::mv(request), more_ms);
    require_ok(response.getStatus());
    return response.getJson().cStr();
  }

  const std::uint64_t answer_ms;
  kj::AsyncIoContext io;
  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyVatNetwork network;
  capnp::RpcSystem<capnp::rpc::twoparty::VatId> system;
  kvq::wire::Admin::Client admin = nullptr;
};

AdminClient::AdminClient(const std::string& socket_path, std::uint64_t answer_ms)
    : wire_(std::make_unique<Wire>(connect_to(socket_path, answer_ms), answer_ms)) {
  capnp::word scratch[4] = {};
  capnp::MallocMessageBuilder message(scratch);
  auto server = message.initRoot<capnp::rpc::twoparty::VatId>();
  server.setSide(capnp::rpc::twoparty::Side::SERVER);
  auto node = wire_->system.bootstrap(server).castAs<kvq::wire::Node>();
  auto response = wire_->send(node.adminRequest());
  Wire::require_ok(response.getStatus());
  wire_->admin = response.getAdmin();
}

AdminClient::~AdminClient() = default;

std::string AdminClient::status() { return wire_->send(wire_->admin.statusRequest()).getJson().cStr(); }

std::string AdminClient::sessions() { return wire_->send(wire_->admin.sessionsRequest()).getJson().cStr(); }

std::string AdminClient::tenants() { return wire_->send(wire_->admin.tenantsRequest()).getJson().cStr(); }

std::string AdminClient::pages(const std::string& tenant, const std::string& device, std::uint32_t limit) {
  auto request = wire_->admin.pagesRequest();
  request.setTenant(tenant);
  request.setDevice(device);
  request.setLimit(limit);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::sequences(const std::string& tenant, std::uint32_t session, const std::string& device,
                                   std::uint32_t limit) {
  auto request = wire_->admin.sequencesRequest();
  request.setTenant(tenant);
  request.setSession(session);
  request.setDevice(device);
  request.setLimit(limit);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::prefix(const std::string& tenant, const std::string& device, std::uint32_t limit) {
  auto request = wire_->admin.prefixRequest();
  request.setTenant(tenant);
  request.setDevice(device);
  request.setLimit(limit);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::quantize(const std::string& tenant, std::uint64_t idle_ms, bool dry_run) {
  auto request = wire_->admin.quantizeRequest();
  request.setTenant(tenant);
  request.setIdleMs(idle_ms);
  request.setDryRun(dry_run);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::set(const std::string& key, const std::string& value, bool dry_run, bool saved) {
  auto request = wire_->admin.setRequest();
  request.setKey(key);
  request.setValue(value);
  request.setDryRun(dry_run);
  request.setSaved(saved);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::evict(const std::string& tenant, std::uint64_t idle_ms, bool dry_run) {
  auto request = wire_->admin.evictRequest();
  request.setTenant(tenant);
  request.setIdleMs(idle_ms);
  request.setDryRun(dry_run);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::compact(const std::string& tenant, bool dry_run) {
  auto request = wire_->admin.compactRequest();
  request.setTenant(tenant);
  request.setDryRun(dry_run);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::resize(std::uint64_t arena_bytes, const std::string& device, bool dry_run) {
  auto request = wire_->admin.resizeRequest();
  request.setArenaBytes(arena_bytes);
  request.setDevice(device);
  request.setDryRun(dry_run);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::drain(std::uint32_t deadline_ms) {
  auto request = wire_->admin.drainRequest();
  request.setDeadlineMs(deadline_ms);
  return wire_->document(kj::mv(request), deadline_ms);
}

std::string AdminClient::evict_session(std::uint32_t session, bool kill) {
  auto request = wire_->admin.evictSessionRequest();
  request.setSession(session);
  request.setKill(kill);
  return wire_->document(kj::mv(request));
}

std::string AdminClient::verify(const std::string& tenant, std::uint32_t deadline_ms) {
  auto request = wire_->admin.verifyRequest();
  request.setTenant(tenant);
  request.setDeadlineMs(deadline_ms);
  return wire_->document(kj::mv(request), deadline_ms);
}

std::string AdminClient::events(std::uint64_t after, std::uint32_t limit) {
  auto request = wire_->admin.eventsRequest();
  request.setAfter(after);
  request.setLimit(limit);
  return wire_->send(kj::mv(request)).getJson().cStr();
}

void AdminClient::sleep_ms(std::uint64_t ms) {
  wire_->io.provider->getTimer().afterDelay(ms * kj::MILLISECONDS).wait(wire_->io.waitScope);
}

}  // namespace kvqctl

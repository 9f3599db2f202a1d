// Registration, on the loop thread: one chain from the request to a session whose memory is all mapped; and its
// repetition by which a session goes on under the next daemon.
//
// Invariant: the sink learns where slabs go as soon as the reply is there, since the daemon answers `ready` only after
// the sink has mapped every slab of the tenant. A session that did not get ready is given up before its memory is.
#include <kj/debug.h>

#include <cstring>

#include "client/last_error.h"
#include "client/link.h"
#include "client/wire.h"
#include "kvq/kill_point.h"
#include "kvq/result.h"

namespace kvq::client {
namespace {

struct Registering {
  Registering(Link& link_in, const RegisterRequest& request_in)
      : link(link_in), request(request_in), accepted(kj::newPromiseAndFulfiller<void>()) {}
  ~Registering() {
    if (sink->memory == nullptr || handed_over) return;
    sink->memory->forget_session(sink->session);
    sink->memory = nullptr;
  }
  Link& link;
  const RegisterRequest& request;
  Grant grant;
  std::shared_ptr<Connection::Session::Wire> wire;
  const std::shared_ptr<SinkState> sink = std::make_shared<SinkState>();
  kj::PromiseFulfillerPair<void> accepted;  // by the daemon: the sink knows where slabs go
  TenantMemory::Shape shape;
  kj::Vector<Fd> fds;  // directory, prefix table, segment, doorbell, notice
  bool handed_over = false;
};

void fill(wire::Registration::Builder out, const RegisterRequest& request, const std::string& label) {
  out.setContractVersion(kContractVersion);
  out.setRole(static_cast<wire::Role>(request.role));
  out.setLabel(label);
  auto layers = out.initLayers(request.geometry.layers);
  for (std::uint32_t i = 0; i < request.geometry.layers; ++i) {
    const LayerSpec& spec = request.geometry.layer[i];
    layers[i].setKvHeads(spec.kv_heads);
    layers[i].setHeadDim(spec.head_dim);
    layers[i].setDtype(static_cast<std::uint8_t>(spec.dtype));
    layers[i].setKeepDense(spec.keep_dense != 0);
  }
  out.setFingerprint(kj::arrayPtr(request.fingerprint, sizeof(request.fingerprint)));
  out.setPageTokens(kPageTokens);
  out.setFormatFloorDense(request.format_floor_dense);
  out.setCredits(request.credits);
  out.setDevice(request.device);
}

Reply on_this_thread(kvq_status status) { return status == KVQ_OK ? Reply{} : failure(status, last_error()); }

// Where the pages are: on the host, or on the GPU of a UUID, which then has a copy of the directory, too.
Reply name_device(Registering& r, wire::SessionInfo::Reader info) {
  if (r.grant.device == "host") return {};
  if (r.grant.device != "cuda" || info.getDeviceUuid().size() == 0 || info.getMirrorBytes() < sizeof(DirectoryEntry)) {
    return failure(KVQ_ERR_VERSION_MISMATCH, "kvqd keeps its pages on device \"" + r.grant.device + "\" (\"" +
                                                 info.getDeviceUuid().cStr() + "\", mirror of " +
                                                 std::to_string(info.getMirrorBytes()) +
                                                 " bytes), of which this libkvq does not know; install kvqd and "
                                                 "libkvq of one release");
  }
  r.shape.device_uuid = info.getDeviceUuid().cStr();
  r.shape.mirror_bytes = info.getMirrorBytes();
  return {};
}

Reply accept_info(Registering& r, wire::SessionInfo::Reader info) {
  if (info.getSalt().size() != sizeof(r.grant.salt) || info.getSlabBytes() == 0 ||
      info.getArenaBytes() < info.getSlabBytes()) {
    return failure(KVQ_ERR_VERSION_MISMATCH, "kvqd's registration reply has a salt of " +
                                                 std::to_string(info.getSalt().size()) + " bytes and slabs of " +
                                                 std::to_string(info.getSlabBytes()) +
                                                 "; install kvqd and libkvq of one release");
  }
  std::memcpy(r.grant.salt, info.getSalt().begin(), sizeof(r.grant.salt));
  r.grant.session = SessionId{info.getSession()};
  r.grant.tenant_name = info.getTenantName().cStr();
  r.grant.device = info.getDevice().cStr();
  r.grant.cold_format = static_cast<Format>(info.getColdFormat());
  r.shape = {info.getDaemonInstance(), TenantId{info.getTenant()}, info.getArenaBytes(), info.getSlabBytes()};
  if (auto known = name_device(r, info); known.status != KVQ_OK) return known;
  r.grant.memory = TenantMemory::of(r.shape);
  if (r.request.role != KVQ_ROLE_CONTROL) {
    if (auto s = r.grant.memory->open_device(); s != KVQ_OK) return on_this_thread(s);
  }
  r.sink->memory = r.grant.memory;
  r.sink->session = r.grant.session;
  r.sink->link = r.link.number();
  r.accepted.fulfiller->fulfill();
  return {};
}

Reply map_all(Registering& r) {
  if (auto s = r.grant.memory->map_tables(r.fds[0].get(), r.fds[1].get()); s != KVQ_OK) return on_this_thread(s);
  if (auto s = map_segment(r.fds[2].get(), r.shape.tenant, r.grant.session, r.grant.segment); s != KVQ_OK)
    return on_this_thread(s);
  r.grant.doorbell = std::move(r.fds[3]);
  r.grant.notice = std::move(r.fds[4]);
  r.wire->notice_fd = r.grant.notice.get();
  const auto& segment = *reinterpret_cast<const Segment*>(r.grant.segment->data());
  r.wire->words = &segment.daemon;
  std::memcpy(r.wire->token, segment.header.token, sizeof(r.wire->token));
  return {};
}

// What kernels read in place of the directory; there is one once the session is ready.
kj::Promise<Reply> fetch_mirror(const std::shared_ptr<Registering>& r) {
  if (r->shape.mirror_bytes == 0 || r->request.role == KVQ_ROLE_CONTROL) return Reply{};
  return r->wire->session.mirrorRequest().send().then([r](auto&& response) -> kj::Promise<Reply> {
    return take_descriptor(response.getMemory()).then([r](int number) {
      const Fd fd(number);
      return on_this_thread(r->grant.memory->map_mirror(fd.get()));
    });
  });
}

kj::Promise<Reply> wait_until_ready(const std::shared_ptr<Registering>& r) {
  return r->wire->session.readyRequest().send().then([r](auto&& response) -> kj::Promise<Reply> {
    if (r->sink->first_error.status != KVQ_OK) return Reply(r->sink->first_error);
    const Reply ready = reply_of(response.getStatus());
    return ready.status == KVQ_OK ? fetch_mirror(r) : kj::Promise<Reply>(ready);
  });
}

kj::Promise<Reply> fetch_memory(const std::shared_ptr<Registering>& r) {
  auto& session = r->wire->session;
  auto wanted = kj::heapArrayBuilder<kj::Promise<int>>(5);
  wanted.add(take_descriptor(session.directoryRequest().send().getMemory()));
  wanted.add(take_descriptor(session.prefixTableRequest().send().getMemory()));
  wanted.add(take_descriptor(session.segmentRequest().send().getMemory()));
  wanted.add(take_descriptor(session.doorbellRequest().send().getMemory()));
  wanted.add(take_descriptor(session.noticeRequest().send().getMemory()));
  return kj::joinPromises(wanted.finish()).then([r](kj::Array<int>&& numbers) -> kj::Promise<Reply> {
    for (const int number : numbers) r->fds.add(Fd(number));
    Reply mapped = map_all(*r);
    if (mapped.status != KVQ_OK) return mapped;
    return wait_until_ready(r);
  });
}

// Why the daemon's session is not the one that `session` was; empty: it is.
std::string difference(const Connection::Session::Wire& session, wire::SessionInfo::Reader info) {
  const TenantMemory::Shape& shape = session.sink->memory->shape();
  if (info.getDaemonInstance() != shape.daemon_instance) return "it is another instance";
  if (info.getTenant() != raw(shape.tenant)) {
    return "tenant " + std::to_string(info.getTenant()) + ", was " + std::to_string(raw(shape.tenant));
  }
  if (info.getSession() != raw(session.sink->session)) {
    return "session " + std::to_string(info.getSession()) + ", was " + std::to_string(raw(session.sink->session));
  }
  return {};
}

}  // namespace

kj::Promise<Reply> register_on_loop(Link& link, const RegisterRequest& request, Grant& grant,
                                    std::shared_ptr<Connection::Session::Wire>& wire) {
  auto r = std::make_shared<Registering>(link, request);
  auto call = link.node().registerRequest();
  fill(call.initRequest(), request, link.label());
  if (request.role != KVQ_ROLE_CONTROL) {
    call.getRequest().setSlabs(
        kj::heap<SlabSinkServer>(r->sink, link.number(), kj::mv(r->accepted.promise), link.timer()));
  }
  auto ready = call.send().then([r](auto&& response) -> kj::Promise<Reply> {
    Reply reply = reply_of(response.getStatus());
    if (reply.status == KVQ_OK) kill_point(KillPoint::client_registered);
    if (reply.status == KVQ_OK) reply = accept_info(*r, response.getInfo());
    if (reply.status != KVQ_OK) return reply;
    r->wire = std::make_shared<Connection::Session::Wire>(response.getSession(), r->sink, r->request);
    return fetch_memory(r);
  });
  return ready.then([r, &grant, &wire](Reply reply) {
    if (reply.status != KVQ_OK) return reply;
    r->handed_over = true;
    r->link.add(r->wire);
    grant = std::move(r->grant);
    wire = std::move(r->wire);
    return reply;
  });
}

kj::Promise<Resumed> resume_on_loop(Link& link, Connection::Session::Wire& session, kj::Promise<void> accepted) {
  auto call = link.node().registerRequest();
  auto request = call.initRequest();
  fill(request, session.request, link.label());
  request.setResumeSession(raw(session.sink->session));
  request.setResumeToken(kj::arrayPtr(session.token, sizeof(session.token)));
  if (session.request.role != KVQ_ROLE_CONTROL) {
    request.setSlabs(kj::heap<SlabSinkServer>(session.sink, link.number(), kj::mv(accepted), link.timer()));
  }
  return call.send().then([&session](auto&& response) -> Resumed {
    const Reply reply = reply_of(response.getStatus());
    if (reply.status != KVQ_OK) return {reply.text.empty() ? "it refused" : reply.text};
    if (session.ended) return {"ended"};
    return {difference(session, response.getInfo()), response.getSession()};
  });
}

}  // namespace kvq::client

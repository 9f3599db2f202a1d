// Sessions: how a process comes, becomes ready, loses its connection and ends.
//
// Invariant: what a process holds stays until process_ended, because until then it may still read. A session without
// its connection cannot map new slabs, so the pages that it holds are not moved.
#include <sys/random.h>

#include <algorithm>

#include "daemon/store_state.h"
#include "kvq/step_protocol.h"

namespace kvq {

Result<SessionId> StoreState::open_session(const SessionRequest& request, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  if (draining_) return Error{Errc::draining, 0, "the daemon is draining"};
  if (raw(request.tenant) == 0 || raw(request.tenant) > tenants_.size())
    return Error{Errc::stale_id, 0, "no such tenant"};
  if (sessions_.size() >= config_.max_sessions) return Error{Errc::limit_reached, 0, "max_sessions are open"};
  if (request.credits > kMagazineSlots) return Error{Errc::limit_reached, 0, "a magazine holds at most 4096 credits"};
  if (const Error error = check_geometry(request.geometry, device_.slab_bytes()); error.code != Errc::ok) return error;
  const Result<std::uint16_t> model = layouts_->intern(request.geometry, [this](std::uint16_t m) {
    const auto uses = [m](const auto& entry) { return entry.second->model == m; };
    if (std::any_of(sessions_.begin(), sessions_.end(), uses)) return true;
    return pool_.layout_in_use(Layouts::id(m, Format::dense)) ||
           pool_.layout_in_use(Layouts::id(m, config_.cold_format));
  });
  if (!model) return model.error();
  count_layers(request.geometry);

  const std::uint32_t last_session = tables_.root_record().last_session;
  if (last_session % kSessionsOfRange == kSessionsOfRange - 1) {
    return Error{Errc::limit_reached, 0, "all numbers of sessions have been given out; drain and start kvqd anew"};
  }
  SessionRecord* record = free_session_record();
  if (record == nullptr) return Error{Errc::limit_reached, 0, "max_sessions are open"};
  *record = SessionRecord{};  // its id stays 0 until everything is there
  SessionSegment::Spec spec{.session = SessionId{last_session + 1}, .tenant = request.tenant, .owner_pid = request.pid};
  if (::getrandom(spec.token.data(), spec.token.size(), 0) != static_cast<ssize_t>(spec.token.size())) {
    return Error{Errc::system, errno, "random bytes for a session's token"};
  }
  Result<SessionSegment> segment = SessionSegment::create(spec, record->counts);
  if (!segment) return segment.error();
  keep(kept_name("segment", raw(spec.session)), segment->descriptor());
  kill_point(KillPoint::session_kept);
  tables_.root_record().last_session = raw(spec.session);
  write_session(*record, spec, request, *model);
  kill_point(KillPoint::session_recorded);

  auto s = std::make_unique<Session>();
  s->id = spec.session;
  s->record = record;
  s->request = request;
  s->model = *model;
  s->segment = std::move(*segment);
  s->oldest_since_ms = now_ms_;
  Session& session = *s;
  sessions_.emplace(session.id, std::move(s));
  Tenant& t = tenant_of(request.tenant);
  t.sessions.push_back(session.id);
  for (std::uint32_t i = 0; i < pool_.size() && request.maps_slabs; ++i) {
    const Slab& slab = pool_.slab(SlabId{i});
    if (slab.tenant != t.id || (slab.state != SlabState::creating && slab.state != SlabState::ready)) continue;
    slab_use_[i].importers.push_back(session.id);
    session.unmapped.push_back(SlabId{i});
    queue_notice(session.id, SlabId{i}, true);
  }
  settle_readiness(session);
  update_words(session);
  const SessionId id = session.id;
  log("event=session_open session=" + std::to_string(raw(id)) + " tenant=" + t.spec.name +
      " pid=" + std::to_string(request.pid));
  deliver_notices();
  return id;
}

SessionRecord* StoreState::free_session_record() {
  for (SessionRecord& r : tables_.sessions.records()) {
    if (raw(r.id) == 0) return &r;
  }
  return nullptr;
}

void StoreState::write_session(SessionRecord& r, const SessionSegment::Spec& spec, const SessionRequest& request,
                               std::uint16_t model) {
  r.tenant = request.tenant;
  r.pid = request.pid;
  r.uid = request.uid;
  r.model = model;
  r.flags = static_cast<std::uint16_t>((request.maps_slabs ? kSessionMapsSlabs : 0) |
                                       (request.floor_dense ? kSessionFloorDense : 0));
  r.credits_target = request.credits;
  r.token = spec.token;
  std::copy(request.fingerprint.begin(), request.fingerprint.end(), r.fingerprint);
  request.label.copy(r.label, sizeof(r.label) - 1);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  r.id = spec.session;
}

SessionMemory StoreState::memory(SessionId id) const {
  const Session* s = find_session(id);
  KVQ_ASSERT(s != nullptr);
  const Tenant& t = tenant_of(s->request.tenant);
  return {t.directory.read_only_descriptor(), t.prefix_file.read_only_descriptor(), s->segment.descriptor(),
          device_.mirror_descriptor(t.id)};
}

bool StoreState::is_ready(SessionId id) const {
  const Session* s = find_session(id);
  return s != nullptr && s->ready;
}

void StoreState::settle_readiness(Session& s) {
  if (s.ready || !s.unmapped.empty()) return;
  if (s.request.maps_slabs && device_.has_mirrors() && !tenant_of(s.request.tenant).mirror_kept) return;
  s.record->flags |= kSessionReady;  // one store, and nothing else depends on it
  s.ready = true;
  s.changed = true;
}

void StoreState::acknowledge(SessionId id, SlabId slab, bool mapped) {
  Session* s = find_session(id);
  if (s == nullptr || !pool_.names_slab(slab)) return;
  SlabUse& use = slab_use_[raw(slab)];
  const bool drains = pool_.slab(slab).state == SlabState::draining;
  if (mapped) {
    std::erase(s->unmapped, slab);
    settle_readiness(*s);
    if (!drains) std::erase(use.awaited, id);
    make_ready_if_answered(slab);
  } else if (drains) {
    std::erase(s->unmapped, slab);
    settle_readiness(*s);
    std::erase(use.importers, id);
    std::erase(use.awaited, id);
    finish_drain_if_answered(slab);
  }
}

void StoreState::disconnect(SessionId id) {
  Session* s = find_session(id);
  if (s == nullptr || !s->connected) return;
  s->connected = false;
  s->waits = false;
  s->wish = 0;
  // From here on a scan sees every step that did not see the word.
  revoke<SharedMemory>(s->segment.words().revoked);
  std::erase_if(notices_, [id](const SlabNotice& n) { return n.session == id; });
  for (const auto& [number, sequence] : s->sequences) {
    set_sequence_flags(sequence, sequences_->record(sequence).flags | kSequenceImmobile);
    commit();
  }
  s->record->flags |= kSessionClosed;  // after its sequences: an adopted session that is closed is closed again
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    // It will not map a slab any more, but it may still have one mapped.
    if (pool_.slab(SlabId{i}).state != SlabState::creating) continue;
    std::erase(slab_use_[i].awaited, id);
    make_ready_if_answered(SlabId{i});
  }
  log("event=session_disconnect session=" + std::to_string(raw(id)));
}

void StoreState::process_ended(SessionId id, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Session* s = find_session(id);
  if (s == nullptr) return;
  Tenant& t = tenant_of(s->request.tenant);
  const std::size_t sequences = s->sequences.size();
  const std::uint32_t credits = s->credits;
  release_all(*s);
  s->record->id = SessionId{};
  kill_point(KillPoint::session_ended);
  forget(kept_name("segment", raw(id)));
  std::erase(t.sessions, id);
  std::erase_if(notices_, [id](const SlabNotice& n) { return n.session == id; });
  sessions_.erase(id);  // with its segment, so that its steps count as ended
  forget_importer(id);
  settle_seals(t);
  log("event=session_end session=" + std::to_string(raw(id)) + " sequences=" + std::to_string(sequences) +
      " credits=" + std::to_string(credits));
}

// Its sequences and credits, each in a transaction of its own.
void StoreState::release_all(Session& s) {
  Tenant& t = tenant_of(s.request.tenant);
  while (!s.sequences.empty()) {
    end_sequence(s, s.sequences.begin()->second);
    commit();
  }
  // Credits are few beside all pages, but only their records say whose they are.
  for (std::uint32_t i = 1; i < t.pages->capacity() && s.credits > 0; ++i) {
    const PageRecord& r = t.pages->record(PageId{i});
    if (r.state != PageState::credit || r.owner != s.id) continue;
    --s.credits;
    retire_page(t, PageId{i});
    commit();
  }
  KVQ_ASSERT(s.credits == 0);
}

Result<void> StoreState::evict(SessionId id, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Session* s = find_session(id);
  if (s == nullptr) return Error{Errc::stale_id, 0, "no such session"};
  disconnect(id);
  s->record->flags |= kSessionEvicted;  // its ring is read no more
  release_all(*s);
  settle_seals(tenant_of(s->request.tenant));
  log("event=session_evict session=" + std::to_string(raw(id)) + " pid=" + std::to_string(s->request.pid));
  return {};
}

std::vector<AdoptedSession> StoreState::adopted_sessions() const {
  std::vector<AdoptedSession> out;
  for (const auto& [id, s] : sessions_) {
    out.push_back({.id = id,
                   .tenant = s->request.tenant,
                   .pid = s->request.pid,
                   .uid = s->request.uid,
                   .label = s->request.label,
                   .waits = s->waits});
  }
  return out;
}

Result<void> StoreState::resume_session(SessionId id, const SessionToken& token, const SessionRequest& request,
                                        std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  Session* s = find_session(id);
  if (s == nullptr || !s->waits) return Error{Errc::stale_id, 0, "no session of that number waits for its client"};
  unsigned different = 0;
  for (std::size_t i = 0; i < token.size(); ++i) different |= token[i] ^ s->record->token[i];
  if (different != 0) return Error{Errc::permission_denied, 0, "the session's token is another"};
  if (request.tenant != s->request.tenant) return Error{Errc::permission_denied, 0, "the session's tenant is another"};
  if (!(request.geometry == s->request.geometry) || request.maps_slabs != s->request.maps_slabs) {
    return Error{Errc::wrong_layout, 0, "the session was registered with another model or role"};
  }
  s->waits = false;
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const std::vector<SessionId>& importers = slab_use_[i].importers;
    if (std::find(importers.begin(), importers.end(), id) == importers.end()) continue;
    queue_notice(id, SlabId{i}, pool_.slab(SlabId{i}).state != SlabState::draining);
  }
  s->changed = true;
  log("event=session_resume session=" + std::to_string(raw(id)) + " pid=" + std::to_string(s->request.pid));
  deliver_notices();
  return {};
}

}  // namespace kvq

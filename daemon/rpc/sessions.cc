// Life of the sessions: open, push slabs, park requests, close, release.
#include "daemon/rpc/sessions.h"

#include <kj/debug.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "daemon/rpc/kept_session.h"

namespace kvq {
namespace {

std::string id_text(const LiveSession& s) {
  return "session=" + std::to_string(raw(s.id)) + " pid=" + std::to_string(s.process->peer.pid);
}

// Its segment, what is kept of it, what is handed to its client, and a slab in transit.
constexpr int kDescriptorsOfASession = 12;

// Whether a session can have all of them: half a session would be a riddle to its client.
bool descriptors_left(int any) {
  std::vector<SharedFd> taken;
  for (int i = 0; i < kDescriptorsOfASession; ++i) {
    taken.push_back(duplicate(any));
    if (taken.back()->get() < 0) return false;
  }
  return true;
}

}  // namespace

void watch_end(EventLoop& loop, const std::shared_ptr<Process>& process, std::function<void(const Process&)> ended) {
  const auto seen = [tell = std::move(ended), weak = std::weak_ptr<Process>(process)] {
    const auto gone = weak.lock();
    if (gone == nullptr) return;
    const auto tell_last = tell;  // what cancels the watch ends this closure
    gone->ended_watch.cancel();
    gone->ended = true;
    tell_last(*gone);
    if (gone->cut) gone->cut();  // a forked child may hold the socket open
  };
  process->ended_watch = loop.on_readable(process->peer.pidfd, seen);
}

void LiveSession::cut() const {
  if (process->cut) process->cut();
}

// A sink that answers with an exception cannot be trusted to have mapped anything.
void LiveSession::taskFailed(kj::Exception&&) { cut(); }

Sessions::Sessions(EventLoop& loop, Store& store, const RpcOptions& options)
    : loop_(loop),
      store_(store),
      options_(options),
      room_events_(options.log, options.served_as.empty() ? options.device : options.served_as),
      ticker_(loop, store, options.tick_ms, [this](std::uint64_t now_ms, const TickReport& report) {
        room_events_.add(report, now_ms);
        after_tick(now_ms);
      }) {
  take_up_adopted();
}

Sessions::~Sessions() noexcept(false) {}

Result<std::shared_ptr<LiveSession>> Sessions::open(const std::shared_ptr<Process>& process,
                                                    const SessionRequest& request,
                                                    kj::Maybe<wire::SlabSink::Client> sink) {
  if (left_) return Error{Errc::draining, 0, "kvqd is about to end; connect again"};
  auto session = std::make_shared<LiveSession>();
  session->doorbell = kj::AutoCloseFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  session->notice = kj::AutoCloseFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (session->doorbell.get() < 0 || session->notice.get() < 0 || !descriptors_left(session->doorbell)) {
    return Error{Errc::system, EMFILE, "kvqd has no descriptors left for another session; raise its LimitNOFILE"};
  }
  opening_ = true;
  const auto id = store_.open_session(request, loop_.now_ms());
  opening_ = false;
  if (!id) {
    early_.clear();
    return id.error();
  }
  session->id = *id;
  session->tenant = request.tenant;
  session->label = request.label;
  session->process = process;
  session->sink = kj::mv(sink);
  if (options_.keeper != nullptr) {
    keep_session(*options_.keeper, *id, process->peer.pid, process->peer.pidfd, session->doorbell, session->notice);
  }
  give_memory(*session);
  sessions_[*id] = session;
  ++counts_.opened;
  watch_doorbell(*session);
  push_early(session);
  set_pace();
  ticker_.soon();
  settle();
  return session;
}

void Sessions::give_memory(LiveSession& session) {
  const SessionMemory memory = store_.memory(session.id);
  session.directory = make_memory(duplicate(memory.directory_read_only));
  session.prefix_table = make_memory(duplicate(memory.prefix_table_read_only));
  session.segment = make_memory(duplicate(memory.segment));
  session.doorbell_memory = make_memory(duplicate(session.doorbell));
  session.notice_memory = make_memory(duplicate(session.notice));
}

void Sessions::watch_doorbell(LiveSession& session) {
  session.doorbell_watch = loop_.on_readable(session.doorbell, [this, s = &session] {
    Bell::silence(s->doorbell);
    drain_ring(*s);
    settle();
    ticker_.soon();
  });
}

void Sessions::push_early(const std::shared_ptr<LiveSession>& session) {
  for (const EarlyNotice& e : std::exchange(early_, {})) {
    if (e.notice.session == session->id) push(session, e.notice, e.fd);
  }
}

void Sessions::drain_ring(LiveSession& session) {
  if (!session.closed) store_.drain_commands(session.id, loop_.now_ms());
}

void Sessions::close(LiveSession& session) {
  if (session.left || session.closed || sessions_.count(session.id) == 0) return;
  drain_ring(session);  // what it wrote before it left counts
  session.given_up = session.process->cut && !session.process->lost && !session.process->ended;
  end_requests(session);
}

void Sessions::end_requests(LiveSession& session) {
  session.closed = true;
  session.doorbell_watch.cancel();
  session.unacknowledged.clear();
  store_.disconnect(session.id);
  reject_parked(session);
  settle();
  ticker_.soon();
}

std::vector<std::shared_ptr<LiveSession>> Sessions::of(const Process& process) const {
  std::vector<std::shared_ptr<LiveSession>> out;
  for (const auto& [id, session] : sessions_) {
    if (session->process.get() == &process) out.push_back(session);
  }
  return out;
}

void Sessions::hung_up(const Process& process) {
  for (const auto& session : of(process)) close(*session);
}

void Sessions::process_ended(const Process& process) {
  if (left_) return;
  const std::uint64_t now_ms = loop_.now_ms();
  for (const auto& session : of(process)) release(session, now_ms);
  settle();
}

void Sessions::release(const std::shared_ptr<LiveSession>& session, std::uint64_t now_ms) {
  close(*session);
  sessions_.erase(session->id);
  ++(session->evicted ? counts_.evicted : session->given_up ? counts_.closed : counts_.lost);
  store_.process_ended(session->id, now_ms);
  // Only now: a next daemon that finds the session needs its pidfd to know that the process's steps are over.
  if (options_.keeper != nullptr) forget_session(*options_.keeper, session->id);
  set_pace();
  ticker_.soon();  // what it held is in limbo, and it may have been the last session
  finish_drains(now_ms);
}

void Sessions::deliver(const SlabNotice& notice) {
  SharedFd fd = notice.map ? duplicate(notice.descriptor) : nullptr;
  const auto found = sessions_.find(notice.session);
  if (found == sessions_.end() || found->second->waits()) {  // the latter is told again when its client is back
    if (opening_) early_.push_back({notice, std::move(fd)});
  } else if (!found->second->closed) {
    push(found->second, notice, std::move(fd));
  }
}

// One capability with one descriptor per call. The descriptor is closed here once the client has mapped it; the
// capability goes on as the count of the import.
void Sessions::push(const std::shared_ptr<LiveSession>& session, const SlabNotice& notice, SharedFd fd) {
  KJ_IF_MAYBE (sink, session->sink) {
    if (notice.map && fd->get() < 0) {
      options_.log("event=no_descriptor_left " + id_text(*session));
      session->cut();
      return;
    }
    auto sent = [&]() -> kj::Promise<void> {
      if (notice.map) {
        auto call = sink->mapRequest();
        call.setSlab(raw(notice.slab));
        call.setWritable(notice.writable);
        call.setMemory(make_memory(fd));
        call.setSerial(notice.serial);
        return call.send().ignoreResult();
      }
      auto call = sink->unmapRequest();
      call.setSlab(raw(notice.slab));
      return call.send().ignoreResult();
    }();
    const std::uint64_t serial = ++session->pushes_sent;
    session->unacknowledged[serial] = loop_.now_ms();
    session->pushes.add(sent.then([this, s = session.get(), serial, fd, slab = notice.slab, map = notice.map] {
      if (fd != nullptr) *fd = nullptr;
      s->unacknowledged.erase(serial);
      if (s->closed) return;
      store_.acknowledge(s->id, slab, map);
      settle();
      ticker_.soon();
    }));
  }
}

kj::Promise<Error> Sessions::attempt(const std::shared_ptr<LiveSession>& session, Request request) {
  drain_ring(*session);
  Result<void> outcome = request.attempt();
  settle();
  ticker_.soon();
  if (outcome) return Error{};
  if (outcome.error().code != Errc::no_memory || request.deadline_ms == 0) {
    request.give_up();
    return outcome.error();
  }
  if (session->parked >= options_.max_parked_per_session) {
    log_refusal(*session->process, "waiting_requests", options_.max_parked_per_session);
    return Error{Errc::limit_reached, 0, "too many requests of this session wait for room already"};
  }
  auto pair = kj::newPromiseAndFulfiller<Error>();
  ++session->parked;
  const std::uint64_t until_ms = loop_.now_ms() + request.deadline_ms;
  parked_.push_back({session, until_ms, std::move(request), kj::mv(pair.fulfiller)});
  return kj::mv(pair.promise);
}

void Sessions::try_parked(std::uint64_t now_ms) {
  for (auto it = parked_.begin(); it != parked_.end();) {
    const bool wanted = it->done->isWaiting();  // else its caller has gone
    Result<void> outcome = wanted ? it->request.attempt() : Error{Errc::stale_id, 0, "given up"};
    if (!outcome && outcome.error().code == Errc::no_memory && now_ms < it->until_ms) {
      ++it;
      continue;
    }
    if (!outcome) it->request.give_up();
    it->done->fulfill(outcome ? Error{} : Error(outcome.error()));
    --it->session->parked;
    it = parked_.erase(it);
  }
}

void Sessions::reject_parked(const LiveSession& session) {
  for (auto it = parked_.begin(); it != parked_.end();) {
    if (it->session.get() != &session) {
      ++it;
      continue;
    }
    it->done->reject(KJ_EXCEPTION(DISCONNECTED, "the session has ended"));
    --it->session->parked;
    it = parked_.erase(it);
  }
}

void Sessions::after_tick(std::uint64_t now_ms) {
  if (left_) return;
  end_unclaimed(now_ms);
  try_parked(now_ms);
  release_orphans(now_ms);
  cut_silent(now_ms);
  finish_drains(now_ms);
  finish_verifies(now_ms);
  settle();
}

// A process that hung up but lives keeps nothing; only its open steps, which its threads may still be in, are waited
// for.
void Sessions::release_orphans(std::uint64_t now_ms) {
  const bool any =
      std::any_of(sessions_.begin(), sessions_.end(), [](const auto& entry) { return entry.second->closed; });
  if (!any) return;
  for (const SessionStatus& status : store_.sessions()) {
    const auto found = sessions_.find(status.id);
    if (found == sessions_.end() || !found->second->closed || status.open_steps != 0) continue;
    release(std::shared_ptr<LiveSession>(found->second), now_ms);
  }
}

// No wait on a peer without an end: one that maps no slab keeps its whole tenant from using it.
void Sessions::cut_silent(std::uint64_t now_ms) {
  for (auto& [id, session] : sessions_) {
    if (session->unacknowledged.empty()) continue;
    // `now_ms` was read when the tick began: a push of this very tick may carry a later time.
    if (now_ms < session->unacknowledged.begin()->second + options_.acknowledge_ms) continue;
    options_.log("event=slab_not_acknowledged action=disconnect waited_ms=" + std::to_string(options_.acknowledge_ms) +
                 " " + id_text(*session));
    session->unacknowledged.clear();
    session->cut();
  }
}

void Sessions::settle() {
  for (SessionId id : store_.take_notices()) {
    const auto found = sessions_.find(id);
    if (found == sessions_.end() || bell_.ring(found->second->notice)) continue;
    options_.log("event=notice_blocked action=disconnect " + id_text(*found->second));
    if (found->second->waits()) {
      close(*std::shared_ptr<LiveSession>(found->second));
    } else {
      found->second->cut();
    }
  }
}

std::size_t Sessions::owned_by(const Process& process) const {
  return static_cast<std::size_t>(std::count_if(sessions_.begin(), sessions_.end(), [&](const auto& entry) {
    return entry.second->process.get() == &process && !entry.second->closed;
  }));
}

std::size_t Sessions::of_same_process(const Peer& peer) const {
  return static_cast<std::size_t>(std::count_if(sessions_.begin(), sessions_.end(), [&](const auto& entry) {
    const Peer& other = entry.second->process->peer;
    return other.pid == peer.pid && other.uid == peer.uid;
  }));
}

void Sessions::log_refusal(Process& process, const std::string& cause, std::uint64_t limit) const {
  if (!process.causes.insert(cause).second) return;
  options_.log("event=refused cause=" + cause + (limit == 0 ? "" : " limit=" + std::to_string(limit)) +
               " pid=" + std::to_string(process.peer.pid) + " uid=" + std::to_string(process.peer.uid));
}

}  // namespace kvq

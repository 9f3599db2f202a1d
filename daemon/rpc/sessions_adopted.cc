// Sessions of an earlier daemon: taken up at start, given to their clients, ended when these do not come back.
#include <kj/debug.h>

#include <utility>

#include "daemon/rpc/kept_session.h"
#include "daemon/rpc/sessions.h"

namespace kvq {

// Nothing of the store changes here, since it may not deliver notices before the server is made.
void Sessions::take_up_adopted() {
  for (const AdoptedSession& record : store_.adopted_sessions()) take_up(record);
  if (options_.kept != nullptr) forget_strangers(*options_.kept, options_.keeper);
  set_pace();
  if (!sessions_.empty()) ticker_.soon();
}

void Sessions::take_up(const AdoptedSession& record) {
  Kept none;
  KeptSession kept = take_kept(options_.kept != nullptr ? *options_.kept : none, record);
  auto session = std::make_shared<LiveSession>();
  session->id = record.id;
  session->tenant = record.tenant;
  session->label = record.label;
  session->doorbell = kj::AutoCloseFd(kept.doorbell.release());
  session->notice = kj::AutoCloseFd(kept.notice.release());
  session->process = std::make_shared<Process>();
  session->process->peer.uid = record.uid;
  session->process->peer.pid = static_cast<pid_t>(record.pid);
  session->process->peer.pidfd = kj::AutoCloseFd(kept.pidfd.release());
  sessions_[record.id] = session;
  if (session->process->peer.pidfd.get() >= 0) {
    watch_end(loop_, session->process, [this](const Process& ended) { process_ended(ended); });
  }
  if (!kept.problem.empty()) {
    options_.log("event=session_incomplete action=disconnect session=" + std::to_string(raw(record.id)) +
                 " pid=" + std::to_string(record.pid) + " problem=\"" + kept.problem + "\"");
  }
  if (record.waits && kept.problem.empty()) {
    session->wait_until_ms = loop_.now_ms() + options_.reconnect_ms;
    watch_doorbell(*session);
  } else {
    session->closed = true;
    if (record.waits) incomplete_.push_back(record.id);
  }
}

void Sessions::end_unclaimed(std::uint64_t now_ms) {
  for (SessionId id : std::exchange(incomplete_, {})) {
    if (sessions_.count(id) != 0) store_.disconnect(id);
  }
  for (const auto& [id, session] : sessions_) {
    if (!session->waits() || now_ms < session->wait_until_ms) continue;
    options_.log("event=client_not_back action=disconnect session=" + std::to_string(raw(id)) + " pid=" +
                 std::to_string(session->process->peer.pid) + " waited_ms=" + std::to_string(options_.reconnect_ms));
    close(*session);
  }
}

std::optional<Refusal> Sessions::resume(SessionId id, const SessionToken& token,
                                        const std::shared_ptr<Process>& process, const SessionRequest& request,
                                        kj::Maybe<wire::SlabSink::Client> sink, std::shared_ptr<LiveSession>& resumed) {
  const std::string name = "session " + std::to_string(raw(id));
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || !found->second->waits()) {
    return Refusal{Errc::stale_id, name + " does not wait for its client; register anew"};
  }
  const std::shared_ptr<LiveSession> session = found->second;
  const Peer& before = session->process->peer;
  const Peer& now = process->peer;
  if (now.uid != before.uid || request.tenant != session->tenant) {
    return Refusal{Errc::permission_denied, name + " belongs to another user than uid " + std::to_string(now.uid) +
                                                ", or to another tenant; register anew"};
  }
  if (!same_living_process(before.pidfd, before.pid, now.pidfd, now.pid)) {
    return Refusal{Errc::permission_denied,
                   name + " belongs to another process than " + std::to_string(now.pid) + "; register anew"};
  }
  opening_ = true;
  const auto outcome = store_.resume_session(id, token, request, loop_.now_ms());
  opening_ = false;
  if (!outcome) {
    early_.clear();
    return Refusal{outcome.error().code, describe(outcome.error())};
  }
  session->wait_until_ms = 0;
  session->process = process;
  session->sink = kj::mv(sink);
  give_memory(*session);
  push_early(session);
  settle();
  ticker_.soon();
  resumed = session;
  return std::nullopt;
}

void Sessions::leave() {
  left_ = true;
  for (const auto& [id, session] : sessions_) session->left = true;
}

}  // namespace kvq

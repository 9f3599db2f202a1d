// What an operator may ask of the sessions: drain, verify, evict.
#include <kj/debug.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "daemon/rpc/sessions.h"

namespace kvq {
namespace {

constexpr std::uint64_t kGoodbyeMs = 100;

// Through the pidfd: never another process that has got the number.
std::optional<Refusal> kill_process(const Peer& peer, SessionId id) {
  if (peer.pidfd.get() >= 0 && ::syscall(SYS_pidfd_send_signal, peer.pidfd.get(), SIGKILL, nullptr, 0) == 0) {
    return std::nullopt;
  }
  const int error = peer.pidfd.get() < 0 ? EBADF : errno;
  if (error == ESRCH) return std::nullopt;  // it has ended already
  const std::string pid = std::to_string(peer.pid);
  return Refusal{error == EPERM ? Errc::permission_denied : Errc::system,
                 "session " + std::to_string(raw(id)) + " is evicted, but kvqd may not kill process " + pid +
                     " of uid " + std::to_string(peer.uid) + " (" + std::strerror(error) + "); run kill -9 " + pid +
                     " as root or as that user, or give kvqd CAP_KILL"};
}

}  // namespace

kj::Promise<void> Sessions::drain(std::uint32_t deadline_ms) {
  store_.start_draining();
  auto pair = kj::newPromiseAndFulfiller<void>();
  drains_.push_back({loop_.now_ms() + deadline_ms, kj::mv(pair.fulfiller)});
  finish_drains(loop_.now_ms());
  settle();
  ticker_.soon();
  return kj::mv(pair.promise);
}

void Sessions::finish_drains(std::uint64_t now_ms) {
  for (auto it = drains_.begin(); it != drains_.end();) {
    if (!sessions_.empty() && now_ms < it->until_ms) {
      ++it;
      continue;
    }
    it->done->fulfill();
    it = drains_.erase(it);
    goodbye_ = loop_.every(kGoodbyeMs, [this] { drained_pair_.fulfiller->fulfill(); });
  }
}

kj::Promise<void> Sessions::verify(std::optional<TenantId> tenant, std::uint32_t deadline_ms) {
  store_.verify(tenant);
  auto pair = kj::newPromiseAndFulfiller<void>();
  verifies_.push_back({loop_.now_ms() + deadline_ms, kj::mv(pair.fulfiller)});
  set_pace();
  ticker_.soon();
  return kj::mv(pair.promise);
}

void Sessions::finish_verifies(std::uint64_t now_ms) {
  if (verifies_.empty()) return;
  const bool running = store_.status().verify.running;
  for (auto it = verifies_.begin(); it != verifies_.end();) {
    if (running && now_ms < it->until_ms && it->done->isWaiting()) {
      ++it;
      continue;
    }
    it->done->fulfill();
    it = verifies_.erase(it);
  }
  set_pace();
}

std::optional<Refusal> Sessions::evict(SessionId id, bool kill, pid_t& pid) {
  const auto found = sessions_.find(id);
  const std::shared_ptr<LiveSession> session = found == sessions_.end() ? nullptr : found->second;
  if (auto outcome = store_.evict(id, loop_.now_ms()); session == nullptr || !outcome) {
    return Refusal{Errc::stale_id, "there is no session " + std::to_string(raw(id)) + "; kvqctl sessions lists them"};
  }
  const std::shared_ptr<Process> process = session->process;
  pid = process->peer.pid;
  session->evicted = true;
  if (!session->closed) {
    end_requests(*session);
    session->cut();
  }
  settle();
  ticker_.soon();
  return kill ? kill_process(process->peer, id) : std::nullopt;
}

}  // namespace kvq

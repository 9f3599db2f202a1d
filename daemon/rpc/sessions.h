// The sessions as the rpc room sees them: who owns each, what was promised to it, and which of its requests wait.
//
// Invariant: a session of the store has exactly one LiveSession, from open() until the store has released it. Its end
// has two halves: close() when its capability or socket goes (no new requests), then Store::process_ended() when its
// process is gone or, for a process that lives on, once none of its steps is open. Until then nothing it may still read
// is reused. An adopted session waits for its client: it has no connection, but its rings and its process are watched.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <set>
#include <vector>

#include "daemon/rpc/bell.h"
#include "daemon/rpc/peer.h"
#include "daemon/rpc/registration.h"
#include "daemon/rpc/room_events.h"
#include "daemon/rpc/ticker.h"
#include "daemon/rpc/wire.h"

namespace kvq {

// One client process; shared by its connection and its sessions.
struct Process {
  Peer peer;
  bool ended = false;
  bool lost = false;             // its connection is over
  std::function<void()> cut;     // ends the connection soon, from any callback; empty once it has ended
  EventLoop::Watch ended_watch;  // of the pidfd
  std::uint32_t admins = 0;      // Admin capabilities it holds
  std::set<std::string> causes;  // of refusals that the log has already
};

// Watches the pidfd: when the process has ended, tells `ended` and cuts its connection.
void watch_end(EventLoop& loop, const std::shared_ptr<Process>& process, std::function<void(const Process&)> ended);

struct LiveSession final : private kj::TaskSet::ErrorHandler {
  LiveSession() : pushes(*this) {}
  ~LiveSession() noexcept(false) {}

  SessionId id{};
  TenantId tenant{};
  std::string label;
  std::shared_ptr<Process> process;
  kj::Maybe<wire::SlabSink::Client> sink;  // none for the control role
  kj::AutoCloseFd doorbell, notice;        // eventfds
  // Made once, so that asking again costs no descriptor.
  kj::Maybe<wire::Memory::Client> directory, prefix_table, segment, doorbell_memory, notice_memory;
  bool closed = false;
  bool given_up = false;  // closed while its connection stood
  bool evicted = false;
  bool left = false;                // to the next daemon: nothing ends it here any more
  std::uint64_t wait_until_ms = 0;  // for its client to come back; 0: it is here, or gone for good
  std::uint32_t parked = 0;
  std::map<std::uint64_t, std::uint64_t> unacknowledged;  // push serial -> when it was sent, ms
  std::uint64_t pushes_sent = 0;
  EventLoop::Watch doorbell_watch;
  kj::TaskSet pushes;  // slab calls on their way

  bool waits() const { return wait_until_ms != 0 && !closed && !left; }
  // Ends the connection: the client broke the protocol.
  void cut() const;

 private:
  void taskFailed(kj::Exception&& exception) override;
};

class Sessions {
 public:
  Sessions(EventLoop& loop, Store& store, const RpcOptions& options);
  ~Sessions() noexcept(false);

  Result<std::shared_ptr<LiveSession>> open(const std::shared_ptr<Process>& process, const SessionRequest& request,
                                            kj::Maybe<wire::SlabSink::Client> sink);
  // Takes up an adopted session for the client at the other end of `process`. A refusal changes nothing.
  std::optional<Refusal> resume(SessionId id, const SessionToken& token, const std::shared_ptr<Process>& process,
                                const SessionRequest& request, kj::Maybe<wire::SlabSink::Client> sink,
                                std::shared_ptr<LiveSession>& resumed);
  // The client gave the session up, or its socket closed. Does nothing the second time.
  void close(LiveSession& session);
  // Its connection is over. A request that waits keeps its Session capability alive: only this ends it.
  void hung_up(const Process& process);
  // Its sessions have ended with it.
  void process_ended(const Process& process);
  // Ends what it holds now, cuts its connection and, with `kill`, its process. Errors: stale_id, and what the kill met:
  // the eviction stands then.
  std::optional<Refusal> evict(SessionId id, bool kill, pid_t& pid);
  // The next daemon goes on with the sessions: nothing ends them any more.
  void leave();
  void deliver(const SlabNotice& notice);

  struct Request {
    std::uint32_t deadline_ms = 0;
    std::function<Result<void>()> attempt;
    std::function<void()> give_up = [] {};  // it is not tried any more and was not met
  };
  // Takes the session's ring, then tries `attempt`; while that says no_memory it is tried again after each tick until
  // the deadline. Resolves to the last outcome; rejects when the session ends. Its caller must allow cancellation, so
  // that nothing of a request outlives its connection.
  kj::Promise<Error> attempt(const std::shared_ptr<LiveSession>& session, Request request);
  // Takes what a client wrote to its ring, so that ring and RPC keep their order.
  void drain_ring(LiveSession& session);

  // Admits nothing new; resolves once no session is left or the deadline passed.
  kj::Promise<void> drain(std::uint32_t deadline_ms);
  kj::Promise<void> drained() { return drained_.addBranch(); }
  // Starts to verify pages; resolves when the pass has ended or the deadline passed.
  kj::Promise<void> verify(std::optional<TenantId> tenant, std::uint32_t deadline_ms);
  std::size_t verifying() const { return verifies_.size(); }

  // Rings the clients whose words or magazine changed. Every path that changed the store ends here.
  void settle();

  std::size_t size() const { return sessions_.size(); }
  bool has(SessionId id) const { return sessions_.count(id) != 0; }
  std::size_t parked() const { return parked_.size(); }
  std::size_t owned_by(const Process& process) const;  // sessions that the connection serves
  std::size_t of_same_process(const Peer& peer) const;
  // Logs that something was refused to a peer: once for each cause and connection.
  void log_refusal(Process& process, const std::string& cause, std::uint64_t limit = 0) const;
  Ticker& ticker() { return ticker_; }
  Store& store() { return store_; }
  const Store& store() const { return store_; }
  std::uint64_t ticks() const { return ticker_.ticks(); }
  const SessionCounts& counts() const { return counts_; }
  // A request for pages, or to run a parked sequence again, was met or refused.
  void note_alloc_wait(std::uint64_t ms) { counts_.alloc_wait.add(ms); }
  void note_restore(std::uint64_t ms) { counts_.restore.add(ms); }
  std::uint64_t now_ms() const { return loop_.now_ms(); }
  const RpcOptions& options() const { return options_; }

 private:
  struct Parked {
    std::shared_ptr<LiveSession> session;
    std::uint64_t until_ms;
    Request request;
    kj::Own<kj::PromiseFulfiller<Error>> done;
  };
  struct Wait {
    std::uint64_t until_ms;
    kj::Own<kj::PromiseFulfiller<void>> done;
  };
  struct EarlyNotice {  // delivered inside open_session or resume_session, before the session can take it
    SlabNotice notice;
    SharedFd fd;
  };

  std::vector<std::shared_ptr<LiveSession>> of(const Process& process) const;
  void take_up_adopted();
  void take_up(const AdoptedSession& record);
  void give_memory(LiveSession& session);
  void watch_doorbell(LiveSession& session);
  void push_early(const std::shared_ptr<LiveSession>& session);
  void end_requests(LiveSession& session);
  void after_tick(std::uint64_t now_ms);
  void end_unclaimed(std::uint64_t now_ms);
  void try_parked(std::uint64_t now_ms);
  void release_orphans(std::uint64_t now_ms);
  void cut_silent(std::uint64_t now_ms);
  void finish_drains(std::uint64_t now_ms);
  void finish_verifies(std::uint64_t now_ms);
  void set_pace() { ticker_.keep_going(!sessions_.empty() || !verifies_.empty()); }
  void release(const std::shared_ptr<LiveSession>& session, std::uint64_t now_ms);
  void reject_parked(const LiveSession& session);
  void push(const std::shared_ptr<LiveSession>& session, const SlabNotice& notice, SharedFd fd);

  EventLoop& loop_;
  Store& store_;
  const RpcOptions& options_;
  Bell bell_;
  SessionCounts counts_;
  std::map<SessionId, std::shared_ptr<LiveSession>> sessions_;
  std::vector<EarlyNotice> early_;
  bool opening_ = false;
  std::list<Parked> parked_;
  std::vector<SessionId> incomplete_;  // adopted without all their descriptors: to be disconnected after a tick
  std::vector<Wait> drains_, verifies_;
  bool left_ = false;
  kj::PromiseFulfillerPair<void> drained_pair_ = kj::newPromiseAndFulfiller<void>();
  kj::ForkedPromise<void> drained_ = drained_pair_.promise.fork();
  EventLoop::Watch goodbye_;  // gives drain's answer time to leave
  RoomEvents room_events_;
  Ticker ticker_;
};

}  // namespace kvq

// The one thread of a client that talks to kvqd: it runs KJ's event loop; every other thread hands it work and waits.
//
// Invariant: KJ objects are made, used and destroyed on this thread alone. A caller sleeps on a condition variable
// until its call has resolved, failed or timed out, and by then nothing of the call is alive on the loop. All signals
// are blocked here, so that the host process's handlers run on its own threads.
//
// Work crosses over a mutex and an eventfd rather than kj::Executor, whose hand-over ThreadSanitizer cannot see.
#pragma once

#include <kj/async-io.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kvq/kvq.h"

namespace kvq::client {

// Outcome of a call as it travels back to the caller's thread.
struct Reply {
  kvq_status status = KVQ_OK;
  std::string text;
};

// KVQ_OK or the text that goes with `status`.
Reply failure(kvq_status status, std::string text);

class LoopThread {
 public:
  using Body = std::function<kj::Promise<Reply>(kj::AsyncIoContext& io)>;

  LoopThread();   // throws std::system_error or kj::Exception when the operating system refuses
  ~LoopThread();  // unresolved calls are dropped: their callers must have returned
  LoopThread(const LoopThread&) = delete;
  LoopThread& operator=(const LoopThread&) = delete;

  // Runs `body` on the loop thread and waits for what it promises, at most `timeout_ms`; then `timeout` is the outcome.
  // A body that rejects gives DAEMON_GONE when the connection broke, SYSTEM otherwise. Any thread but the loop's own.
  kvq_status run(Body body, std::uint64_t timeout_ms, const Reply& timeout);

 private:
  struct Call;
  using Work = std::function<void(kj::AsyncIoContext& io, kj::TaskSet& tasks)>;
  void post(Work work);
  void loop(std::function<void()> started);
  std::vector<Work> take_posted();

  int wake_fd_ = -1;
  std::mutex mutex_;
  std::vector<Work> posted_;  // guarded by mutex_
  bool stop_ = false;         // guarded by mutex_
  std::thread thread_;
};

}  // namespace kvq::client

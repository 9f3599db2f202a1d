// The daemon's one loop: KJ outside (RPC, promises), libuv inside (timers, signals, watched descriptors, worker pool).
//
// Invariant: every callback and every promise continuation runs on the thread that constructed the EventLoop; only the
// closures given to submit_blocking run elsewhere. A callback that throws ends run() with that exception, never libuv.
// Idle means asleep: without timers and events the loop takes no turn.
#pragma once

#include <kj/async-io.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace kvq {

class EventLoop {
 public:
  // What `every`, `on_readable` and `on_signal` return: the callback may be called until this is destroyed or
  // cancelled, and not once after, even from within itself. May outlive the loop. Loop thread only.
  class Watch {
   public:
    Watch() = default;
    Watch(Watch&&) noexcept = default;
    Watch& operator=(Watch&& other) noexcept;
    ~Watch() { cancel(); }
    void cancel();

   private:
    friend class EventLoop;
    struct Source;
    explicit Watch(std::shared_ptr<Source> source) : source_(std::move(source)) {}
    std::shared_ptr<Source> source_;
  };

  // `io` must outlive the loop. `workers` sizes libuv's pool, which a process has once: the first loop decides.
  // Throws kj::Exception when the operating system refuses.
  explicit EventLoop(kj::AsyncIoContext& io, unsigned workers = 2);
  // Waits until work given to submit_blocking has ended: it may use what its submitter owns.
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs until `until` resolves. Throws what `until` or a callback threw.
  void run(kj::Promise<void> until);

  // Calls `body` each `interval_ms` (at least 1), first after one interval. Late turns are not made up for.
  [[nodiscard]] Watch every(std::uint64_t interval_ms, std::function<void()> body);

  // Calls `body` on each turn of the loop that finds `fd` readable (level-triggered), so `body` reads it empty or
  // cancels the watch. Works for eventfds, sockets and pidfds (which stay readable: cancel at the first call). `fd`
  // stays the caller's, must outlive the watch, is made non-blocking, and may have one watch at a time. When the
  // descriptor reports an error, `body` is called a last time. Throws when `fd` cannot be watched.
  [[nodiscard]] Watch on_readable(int fd, std::function<void()> body);

  // Runs `work` on the worker pool; resolves on the loop thread when it has ended, or rejects with what it threw.
  // Dropping the promise neither cancels nor waits for the work.
  kj::Promise<void> submit_blocking(std::function<void()> work);

  // Calls `body` after each `signal`; several in a row may be one call. While it is watched, the signal does nothing
  // else.
  [[nodiscard]] Watch on_signal(int signal, std::function<void()> body);

  // Resolves to SIGTERM or SIGINT at the first of them after this call. From the first call on, neither signal ends the
  // process; ask again after each to see a second one.
  kj::Promise<int> on_terminate();

  // Monotonic, comparable across processes of one boot.
  std::uint64_t now_ms() const;

  // How often libuv was pumped, for the metric and the test that idle costs nothing.
  std::uint64_t turns() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvq

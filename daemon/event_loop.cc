// KJ's loop with libuv pumped inside; the only file that includes uv.h. Four rules keep it right:
//  1. One uv_async_t stays open for life: with no active handle libuv reports a timeout of 0 and the loop would spin.
//  2. KJ watches libuv's backend descriptor edge-triggered: ask for readability before pumping, poll it again after.
//  3. libuv registers descriptors and timers only when pumped: whoever adds one wakes the pump.
//  4. libuv's callbacks are C frames: nothing is thrown through them. Signals are libuv's alone; KJ captures none.
#include "daemon/event_loop.h"

#include <kj/async-unix.h>
#include <kj/debug.h>
#include <kj/time.h>
#include <poll.h>
#include <uv.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <vector>

#include "kvq/result.h"

namespace kvq {
namespace {

// More pumps in one go would starve KJ of its own descriptors; what is left is done after it polled them.
constexpr int kPumpsPerTurn = 8;

// KJ polls descriptors and timers only when no event is runnable, unless told a bound; a busy peer would starve the
// rest.
constexpr unsigned kEventsPerPoll = 128;

void check_uv(int status, const char* what) { KJ_REQUIRE(status >= 0, what, uv_strerror(status)); }

bool readable_now(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

}  // namespace

// One libuv timer, poll or signal handle. Owned by itself (`self`) until libuv has closed it, since close is
// asynchronous, and shared with its Watch, which may live longer than the loop.
struct EventLoop::Watch::Source {
  union {
    uv_handle_t handle;
    uv_timer_t timer;
    uv_poll_t poll;
    uv_signal_t signal;
  };
  Impl* loop = nullptr;
  std::function<void()> body;
  bool closing = false;
  std::shared_ptr<Source> self;

  void close();
};

struct EventLoop::Impl {
  using Source = Watch::Source;

  // One closure on its way through the pool.
  struct Work {
    uv_work_t request;
    std::function<void()> body;
    kj::Own<kj::PromiseFulfiller<void>> done;
    kj::Maybe<kj::Exception> thrown;
  };

  kj::Timer& timer;
  kj::WaitScope& wait_scope;
  uv_loop_t uv;
  uv_async_t wake_handle;
  std::vector<Watch> terminate_watches;
  bool pumping = false;
  bool pump_again = false;
  std::uint64_t turns = 0;
  std::vector<kj::Own<kj::PromiseFulfiller<int>>> terminate_waiters;
  kj::PromiseFulfillerPair<void> fault = kj::newPromiseAndFulfiller<void>();
  kj::ForkedPromise<void> faulted = fault.promise.fork();
  kj::Own<kj::UnixEventPort::FdObserver> observer;
  kj::Promise<void> pump_task = nullptr;

  Impl(kj::AsyncIoContext& io, unsigned workers) : timer(io.provider->getTimer()), wait_scope(io.waitScope) {
    wait_scope.setBusyPollInterval(kEventsPerPoll);
    setenv("UV_THREADPOOL_SIZE", std::to_string(workers).c_str(), /*overwrite=*/1);
    check_uv(uv_loop_init(&uv), "cannot create the libuv loop");
    check_uv(uv_async_init(&uv, &wake_handle, [](uv_async_t*) {}), "cannot create the wake-up");
    observer = kj::heap<kj::UnixEventPort::FdObserver>(io.unixEventPort, uv_backend_fd(&uv),
                                                       kj::UnixEventPort::FdObserver::OBSERVE_READ);
    pump_task = kj::evalLater([this] { return pump(); }).eagerlyEvaluate([this](kj::Exception&& e) {
      fault.fulfiller->reject(kj::mv(e));
    });
  }

  ~Impl() {
    pump_task = nullptr;
    observer = nullptr;
    pumping = true;  // closing handles needs no wake-up: the run below ends when they are closed
    uv_walk(
        &uv,
        [](uv_handle_t* handle, void*) {
          if (uv_is_closing(handle)) return;
          const bool of_watch = handle->type == UV_TIMER || handle->type == UV_POLL || handle->type == UV_SIGNAL;
          if (of_watch && handle->data != nullptr) {
            static_cast<Source*>(handle->data)->close();
          } else {
            uv_close(handle, nullptr);
          }
        },
        nullptr);
    // Ends when every handle is closed and all submitted work has come back.
    uv_run(&uv, UV_RUN_DEFAULT);
    const int status = uv_loop_close(&uv);
    KVQ_ASSERT(status == 0);
  }

  // Rule 3. Inside a pump a flag does, outside libuv's own wake-up.
  void wake() {
    pump_again = true;
    if (!pumping) uv_async_send(&wake_handle);
  }

  // One turn: everything libuv has ready, then sleep until its descriptor or its next timer. Tail calls itself, which
  // KJ collapses into constant memory.
  kj::Promise<void> pump() {
    ++turns;
    auto readable = observer->whenBecomesReadable();  // rule 2
    bool more = true;
    for (int i = 0; more && i < kPumpsPerTurn; ++i) {
      pump_again = false;
      pumping = true;
      uv_run(&uv, UV_RUN_NOWAIT);
      pumping = false;
      more = pump_again || readable_now(uv_backend_fd(&uv));
    }
    int timeout_ms = more ? 0 : uv_backend_timeout(&uv);
    if (timeout_ms >= 0) {
      // KJ's own now() is from the start of its turn; counting from it would wake too early, and twice.
      auto due = kj::systemPreciseMonotonicClock().now() + timeout_ms * kj::MILLISECONDS;
      readable = readable.exclusiveJoin(timer.atTime(due));
    }
    return readable.then([this] { return pump(); });
  }

  // Rule 4: the wall between a callback and libuv's frames.
  void call(const std::function<void()>& body) {
    KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] { body(); })) {
      fault.fulfiller->reject(kj::mv(*exception));
    }
  }

  std::shared_ptr<Source> new_source(std::function<void()> body) {
    auto source = std::make_shared<Source>();
    source->loop = this;
    source->body = std::move(body);
    return source;
  }

  // From here libuv knows the handle, so the source keeps itself until the handle is closed.
  static void adopt(const std::shared_ptr<Source>& source) {
    source->handle.data = source.get();
    source->self = source;
  }

  void terminate(int signal) {
    auto waiters = std::move(terminate_waiters);
    for (auto& waiter : waiters) waiter->fulfill(kj::cp(signal));
  }
};

void EventLoop::Watch::Source::close() {
  if (closing) return;
  closing = true;
  // The body may be running right now; it is destroyed with the source, after libuv has let go of the handle.
  uv_close(&handle, [](uv_handle_t* closed) { static_cast<Source*>(closed->data)->self.reset(); });
  loop->wake();
}

void EventLoop::Watch::cancel() {
  if (source_ == nullptr) return;
  source_->close();
  source_.reset();
}

EventLoop::Watch& EventLoop::Watch::operator=(Watch&& other) noexcept {
  auto source = std::move(other.source_);
  cancel();
  source_ = std::move(source);
  return *this;
}

EventLoop::EventLoop(kj::AsyncIoContext& io, unsigned workers) : impl_(std::make_unique<Impl>(io, workers)) {}
EventLoop::~EventLoop() = default;

void EventLoop::run(kj::Promise<void> until) {
  until.exclusiveJoin(impl_->faulted.addBranch()).wait(impl_->wait_scope);
}

EventLoop::Watch EventLoop::every(std::uint64_t interval_ms, std::function<void()> body) {
  KJ_REQUIRE(interval_ms > 0, "an interval is at least 1 ms");
  auto source = impl_->new_source(std::move(body));
  check_uv(uv_timer_init(&impl_->uv, &source->timer), "cannot create a timer");
  Impl::adopt(source);
  auto on_timer = [](uv_timer_t* handle) {
    auto* source = static_cast<Watch::Source*>(handle->data);
    source->loop->call(source->body);
  };
  uv_update_time(&impl_->uv);  // libuv counts from its cached time, which may be from before a long sleep
  check_uv(uv_timer_start(&source->timer, on_timer, interval_ms, interval_ms), "cannot start a timer");
  impl_->wake();
  return Watch(std::move(source));
}

EventLoop::Watch EventLoop::on_readable(int fd, std::function<void()> body) {
  auto source = impl_->new_source(std::move(body));
  check_uv(uv_poll_init(&impl_->uv, &source->poll, fd), "cannot watch a descriptor");
  Impl::adopt(source);
  auto on_poll = [](uv_poll_t* handle, int, int) {
    auto* source = static_cast<Watch::Source*>(handle->data);
    source->loop->call(source->body);
  };
  check_uv(uv_poll_start(&source->poll, UV_READABLE, on_poll), "cannot watch a descriptor");
  impl_->wake();
  return Watch(std::move(source));
}

kj::Promise<void> EventLoop::submit_blocking(std::function<void()> body) {
  auto pair = kj::newPromiseAndFulfiller<void>();
  auto work = std::make_unique<Impl::Work>();
  work->request.data = work.get();
  work->body = std::move(body);
  work->done = kj::mv(pair.fulfiller);
  auto on_worker = [](uv_work_t* request) {
    auto* work = static_cast<Impl::Work*>(request->data);
    work->thrown = kj::runCatchingExceptions([&] { work->body(); });
  };
  auto on_loop = [](uv_work_t* request, int) {
    std::unique_ptr<Impl::Work> work(static_cast<Impl::Work*>(request->data));
    KJ_IF_MAYBE (exception, work->thrown) {
      work->done->reject(kj::mv(*exception));
    } else {
      work->done->fulfill();
    }
  };
  check_uv(uv_queue_work(&impl_->uv, &work->request, on_worker, on_loop), "cannot queue work");
  work.release();  // on_loop takes it back
  impl_->wake();
  return kj::mv(pair.promise);
}

EventLoop::Watch EventLoop::on_signal(int signal, std::function<void()> body) {
  auto source = impl_->new_source(std::move(body));
  check_uv(uv_signal_init(&impl_->uv, &source->signal), "cannot watch signals");
  Impl::adopt(source);
  auto on_signal = [](uv_signal_t* handle, int) {
    auto* source = static_cast<Watch::Source*>(handle->data);
    source->loop->call(source->body);
  };
  check_uv(uv_signal_start(&source->signal, on_signal, signal), "cannot watch signals");
  impl_->wake();
  return Watch(std::move(source));
}

kj::Promise<int> EventLoop::on_terminate() {
  for (const int signal : {SIGTERM, SIGINT}) {
    if (impl_->terminate_watches.size() == 2) break;
    impl_->terminate_watches.push_back(on_signal(signal, [this, signal] { impl_->terminate(signal); }));
  }
  auto pair = kj::newPromiseAndFulfiller<int>();
  impl_->terminate_waiters.push_back(kj::mv(pair.fulfiller));
  impl_->wake();
  return kj::mv(pair.promise);
}

std::uint64_t EventLoop::now_ms() const { return uv_hrtime() / 1'000'000; }
std::uint64_t EventLoop::turns() const { return impl_->turns; }

}  // namespace kvq

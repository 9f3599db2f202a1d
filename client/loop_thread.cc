// Invariant: the loop sleeps in one place, on the eventfd, with no callback pending that nobody waits for.
#include "client/loop_thread.h"

#include <kj/async-unix.h>
#include <kj/debug.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <exception>
#include <future>
#include <system_error>

#include "client/last_error.h"
#include "kvq/result.h"

namespace kvq::client {
namespace {

class IgnoreErrors : public kj::TaskSet::ErrorHandler {  // every task reports to its own caller before it could fail
 public:
  void taskFailed(kj::Exception&&) override {}
};

Reply reply_of(const kj::Exception& exception) {
  const std::string text = exception.getDescription().cStr();
  switch (exception.getType()) {
    case kj::Exception::Type::DISCONNECTED:
      return failure(KVQ_ERR_DAEMON_GONE, "the connection to kvqd broke (" + text + "); call again");
    case kj::Exception::Type::UNIMPLEMENTED:
      return failure(KVQ_ERR_VERSION_MISMATCH,
                     "kvqd does not know this call (" + text + "); install kvqd and libkvq of one release");
    default:
      return failure(KVQ_ERR_SYSTEM, "kvqd failed: " + text);
  }
}

// KJ ignores SIGPIPE for the whole process when its loop starts; libkvq gives the host's choice back. On this thread
// the signal is blocked, so that a write to a dead daemon is an error value all the same.
kj::AsyncIoContext make_context() {
  struct sigaction before {};
  ::sigaction(SIGPIPE, nullptr, &before);
  auto io = kj::setupAsyncIo();
  ::sigaction(SIGPIPE, &before, nullptr);
  return io;
}

std::thread start_without_signals(std::function<void()> body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread(std::move(body));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), "kvq");
  return thread;
}

}  // namespace

Reply failure(kvq_status status, std::string text) { return Reply{status, std::move(text)}; }

struct LoopThread::Call {
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  Reply reply;

  void finish(Reply value) {
    const std::lock_guard lock(mutex);
    reply = std::move(value);
    done = true;
    done_changed.notify_all();
  }
};

LoopThread::LoopThread() : wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  auto started =
      std::make_shared<std::promise<void>>();  // shared: the waiter may be gone before set_value has returned
  thread_ = start_without_signals([this, started] {
    try {
      loop([started] { started->set_value(); });
    } catch (...) {
      started->set_exception(std::current_exception());  // before the loop runs; afterwards nothing throws out of it
    }
  });
  try {
    started->get_future().get();
  } catch (...) {
    thread_.join();
    ::close(wake_fd_);
    throw;
  }
}

LoopThread::~LoopThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  const std::uint64_t one = 1;
  KVQ_ASSERT(::write(wake_fd_, &one, sizeof(one)) == sizeof(one));
  thread_.join();
  ::close(wake_fd_);
}

void LoopThread::post(Work work) {
  {
    const std::lock_guard lock(mutex_);
    posted_.push_back(std::move(work));
  }
  const std::uint64_t one = 1;
  KVQ_ASSERT(::write(wake_fd_, &one, sizeof(one)) == sizeof(one));
}

std::vector<LoopThread::Work> LoopThread::take_posted() {
  const std::lock_guard lock(mutex_);
  return std::move(posted_);
}

void LoopThread::loop(std::function<void()> started) {
  auto io = make_context();
  kj::UnixEventPort::FdObserver wake(io.unixEventPort, wake_fd_, kj::UnixEventPort::FdObserver::OBSERVE_READ);
  IgnoreErrors ignore;
  kj::TaskSet tasks(ignore);
  started();
  for (;;) {
    // Edge-triggered: read the counter empty first, then wait for its next change.
    std::uint64_t count = 0;
    while (::read(wake_fd_, &count, sizeof(count)) > 0) {
    }
    for (Work& work : take_posted()) work(io, tasks);
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
    }
    wake.whenBecomesReadable().wait(io.waitScope);
  }
}

kvq_status LoopThread::run(Body body, std::uint64_t timeout_ms, const Reply& timeout) {
  auto call = std::make_shared<Call>();
  post([call, body = std::move(body), timeout_ms, timeout](kj::AsyncIoContext& io, kj::TaskSet& tasks) {
    auto expired =
        io.provider->getTimer().afterDelay(timeout_ms * kj::MILLISECONDS).then([timeout] { return timeout; });
    tasks.add(kj::evalNow([&] { return body(io); })
                  .exclusiveJoin(kj::mv(expired))
                  .then([call](Reply reply) { call->finish(std::move(reply)); },
                        [call](kj::Exception&& exception) { call->finish(reply_of(exception)); }));
  });
  std::unique_lock lock(call->mutex);
  call->done_changed.wait(lock, [&] { return call->done; });
  if (call->reply.status == KVQ_OK) return KVQ_OK;
  return fail(call->reply.status, "%s", call->reply.text.c_str());
}

}  // namespace kvq::client

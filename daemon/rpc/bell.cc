// Bounded eventfd calls.
#include "daemon/rpc/bell.h"

#include <kj/debug.h>
#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

namespace kvq {
namespace {

int interrupting_signal() { return SIGRTMIN + 3; }

void arm(timer_t timer, std::uint32_t ms) {
  itimerspec spec{};
  // Repeats: one that fired just before the write began would not end it.
  spec.it_value.tv_nsec = spec.it_interval.tv_nsec = static_cast<long>(ms) * 1'000'000;
  ::timer_settime(timer, 0, &spec, nullptr);
}

}  // namespace

Bell::Bell() {
  struct sigaction action {};
  action.sa_handler = [](int) {};  // its work is to end a system call with EINTR: no SA_RESTART
  KJ_SYSCALL(::sigaction(interrupting_signal(), &action, nullptr));
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = interrupting_signal();
  event._sigev_un._tid = ::gettid();
  KJ_SYSCALL(::timer_create(CLOCK_MONOTONIC, &event, &timer_));
}

Bell::~Bell() { ::timer_delete(timer_); }

bool Bell::ring(int eventfd) {
  pollfd entry{eventfd, POLLOUT, 0};
  // A full counter is readable already: the client is going to look anyway.
  if (::poll(&entry, 1, 0) != 1) return true;
  const std::uint64_t one = 1;
  arm(timer_, kMostWaitMs);
  const bool stuck = ::write(eventfd, &one, sizeof(one)) < 0 && errno == EINTR;
  arm(timer_, 0);
  return !stuck;
}

void Bell::silence(int eventfd) {
  std::uint64_t count = 0;
  iovec whole{&count, sizeof(count)};
  [[maybe_unused]] const ssize_t got = ::preadv2(eventfd, &whole, 1, -1, RWF_NOWAIT);
}

}  // namespace kvq

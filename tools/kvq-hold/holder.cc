// Signals arrive as a descriptor (signalfd), so that nothing runs in a handler and the poll is the only wait.
#include "tools/kvq-hold/holder.h"

#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ranges>
#include <utility>

#include "tools/kvq-hold/failure.h"

namespace kvq_hold {
namespace {

constexpr std::size_t kMessagesPerTurn = 256;      // then signals get their turn
constexpr std::size_t kMessagesAtDeath = 100'000;  // more than any queue holds: a flood must not put off the restart
constexpr std::uint64_t kRefusalLines = 10;        // a second
constexpr std::size_t kOwnDescriptors = 64;

std::uint64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

void say(const std::string& line) {
  const std::string text = "kvq-hold: " + line + "\n";
  (void)!::write(STDERR_FILENO, text.data(), text.size());
}

std::string number(std::uint64_t value) { return std::to_string(value); }
std::string held(const DescriptorStore& store) { return "holds " + number(store.size()) + " descriptors"; }

// Raises the soft limit. A start needs each held descriptor twice for a moment (child.cc).
std::size_t most_descriptors(std::size_t asked) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return asked;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max == RLIM_INFINITY || limit.rlim_max < kOwnDescriptors) return asked;
  return std::min<std::size_t>(asked, (limit.rlim_max - kOwnDescriptors) / 2);
}

int take_signals() {
  sigset_t set;
  ::sigemptyset(&set);
  for (const int signal : {SIGCHLD, SIGTERM, SIGINT, SIGHUP}) ::sigaddset(&set, signal);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  return ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

}  // namespace

Holder::Holder(const Options& options, int listening_fd)
    : options_(options),
      listening_fd_(listening_fd),
      store_(most_descriptors(options.max_descriptors)),
      signals_(take_signals()) {
  if (signals_ < 0) throw Failure(kEnvironment, std::string("signalfd: ") + std::strerror(errno) + ": raise ulimit -n");
}

Holder::~Holder() { ::close(signals_); }

int Holder::run() {
  start();
  while (!done_) {
    pollfd entries[] = {{signals_, POLLIN, 0}, {notify_.fd(), POLLIN, 0}};
    int wait_ms = -1;
    if (child_ == 0) {
      const std::uint64_t now = now_ms();
      wait_ms = start_at_ms_ > now ? static_cast<int>(std::min<std::uint64_t>(start_at_ms_ - now, 60'000)) : 0;
    }
    ::poll(entries, 2, wait_ms);
    for (signalfd_siginfo info; ::read(signals_, &info, sizeof info) == sizeof info && !done_;) {
      on_signal(static_cast<int>(info.ssi_signo));
    }
    take_messages(kMessagesPerTurn);
    if (!done_ && child_ == 0 && now_ms() >= start_at_ms_) start();
  }
  return exit_code_;
}

void Holder::start() {
  std::vector<Passed> passed;
  if (listening_fd_ >= 0) passed.push_back({"kvqd.socket", listening_fd_});
  for (const auto& entry : std::views::reverse(store_.entries())) passed.push_back({entry.name, entry.fd});
  restarting_ = ready_ = false;
  try {
    child_ = start_child(options_.command, passed, notify_.address());
  } catch (const Failure& failure) {
    say(failure.what());
    return died({.exit_code = 1});  // the machine may have room for a process later
  }
  say("started pid=" + number(static_cast<std::uint64_t>(child_)) + "; " + held(store_));
}

void Holder::take_messages(std::size_t most) {
  for (std::size_t i = 0; i < most; ++i) {
    auto message = notify_.receive();
    if (!message) return;
    take(*message);
  }
}

void Holder::take(Message& message) {
  if (message.sender != child_ || child_ == 0) {
    message.problem = "pid " + number(static_cast<std::uint64_t>(message.sender)) + " sent it, who is not the daemon";
  }
  if (!message.problem.empty()) {
    for (const int fd : message.fds) ::close(fd);
    return refuse("a message: " + message.problem);
  }
  if (message.remove) store_.remove(message.name);
  for (const int fd : message.fds) {
    if (const std::string why = store_.add(message.name, fd); !why.empty()) refuse(message.name + ": " + why);
  }
  if (message.ready && !std::exchange(ready_, true))
    say("ready pid=" + number(static_cast<std::uint64_t>(child_)) + "; " + held(store_));
}

void Holder::refuse(const std::string& why) {
  const std::uint64_t now = now_ms();
  if (now - refusals_since_ms_ >= 1000) {
    if (refusals_ > kRefusalLines) say("refused " + number(refusals_ - kRefusalLines) + " more");
    refusals_since_ms_ = now;
    refusals_ = 0;
  }
  if (++refusals_ <= kRefusalLines) say("refused " + why);
}

void Holder::on_signal(int signal) {
  if (signal == SIGCHLD) return reap();
  if (signal == SIGHUP) {
    say("restart asked for; " + held(store_));
    restarting_ = true;
    start_at_ms_ = 0;
    if (child_ != 0 && !ending_) ::kill(child_, SIGTERM);
    return;
  }
  const bool again = ending_;
  ending_ = true;
  if (child_ == 0) return finish(kOk);
  say(std::string("asked to end; ") + (again ? "killing" : "ending") + " the daemon");
  ::kill(child_, again ? SIGKILL : SIGTERM);
}

void Holder::reap() {
  int status = 0;
  if (child_ == 0 || ::waitpid(child_, &status, WNOHANG) != child_) return;
  take_messages(kMessagesAtDeath);  // what it sent last counts
  child_ = 0;
  ended(end_of(status));
}

void Holder::ended(const End& end) {
  const bool as_told = end.signal == SIGTERM || (end.signal == 0 && end.exit_code == 0);
  if (ending_) return finish(as_told ? int{kOk} : end.signal != 0 ? 128 + end.signal : end.exit_code);
  if (restarting_ && as_told) {
    say("ended for a restart; " + held(store_));
    start_at_ms_ = 0;
    return;
  }
  if (end.died()) return died(end);
  say("ended with " + end.text() + ", which is its own choice; dropping " + number(store_.size()) + " descriptors");
  finish(end.exit_code);
}

void Holder::died(const End& end) {
  const std::uint64_t now = now_ms();
  deaths_ms_.push_back(now);
  while (now - deaths_ms_.front() > options_.within_ms) deaths_ms_.pop_front();
  say("died cause=\"" + end.text() + "\"; " + held(store_));
  if (deaths_ms_.size() <= options_.give_up_after) {
    start_at_ms_ = now + options_.restart_ms;
    return;
  }
  say("GIVES UP: " + options_.command[0] + " died " + number(deaths_ms_.size()) + " times within " +
      number(options_.within_ms) + " ms, last by " + end.text() + "; dropping " + number(store_.size()) +
      " descriptors, so every page and session they held is lost; find the cause in its log, then start kvq-hold "
      "again");
  finish(kGaveUp);
}

void Holder::finish(int exit_code) {
  exit_code_ = exit_code;
  done_ = true;
}

}  // namespace kvq_hold

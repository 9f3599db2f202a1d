// The thread that asks.
#include "tools/kvqctl/feed.h"

#include <pthread.h>

#include <chrono>
#include <csignal>

namespace kvqctl {

std::uint64_t clock_ms() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

Feed::Feed(std::string socket, std::uint64_t interval_ms) : socket_(std::move(socket)), interval_ms_(interval_ms) {
  sigset_t all, before;  // signals are the terminal's thread's
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Feed::~Feed() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::optional<Feed::Look> Feed::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(last_, std::nullopt);
}

void Feed::set_interval(std::uint64_t interval_ms) {
  const std::lock_guard lock(mutex_);
  if (interval_ms == interval_ms_) return;
  interval_ms_ = interval_ms;
  changed_.notify_all();
}

Feed::Look Feed::look(std::unique_ptr<AdminClient>& admin) {
  try {
    if (admin == nullptr) admin = std::make_unique<AdminClient>(socket_, kAnswerMs);
    const std::string status = admin->status();
    return sample_of(Json::parse(status), Json::parse(admin->sessions()), clock_ms());
  } catch (const Failure& failure) {
    admin = nullptr;
    return failure;
  } catch (const Json::exception& error) {
    admin = nullptr;
    return Failure(kRefused, std::string("kvqd's reply is not what this kvqctl knows (") + error.what() +
                                 "); install both of one release");
  }
}

void Feed::run() {
  std::unique_ptr<AdminClient> admin;
  std::unique_lock lock(mutex_);
  while (!ends_) {
    lock.unlock();
    const std::uint64_t began_ms = clock_ms();
    Look seen = look(admin);
    lock.lock();
    last_ = std::move(seen);
    // A new interval counts from the look before, too.
    while (!ends_ && clock_ms() < began_ms + interval_ms_) {
      changed_.wait_for(
          lock, std::chrono::milliseconds(began_ms + interval_ms_ - std::min(began_ms + interval_ms_, clock_ms())));
    }
  }
}

}  // namespace kvqctl

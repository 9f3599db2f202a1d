// Invariant: the handler only adds to an atomic: nothing in a child may take a lock that another thread held at the
// fork.
#include "client/fork_guard.h"

#include <pthread.h>

#include <mutex>

namespace kvq::client {

std::atomic<std::uint64_t> fork_generation_word{1};

void install_fork_guard() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { fork_generation_word.fetch_add(1, std::memory_order_relaxed); });
  });
}

}  // namespace kvq::client

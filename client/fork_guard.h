// Fork guard: a child process must not use its parent's handles, since the thread and the session behind them stay with
// the parent.
//
// Invariant: the generation grows by one in every child of fork(), before any code of the child runs; a handle
// remembers the generation it was made in, so that one relaxed load tells its process from a child.
#pragma once

#include <atomic>
#include <cstdint>

namespace kvq::client {

extern std::atomic<std::uint64_t> fork_generation_word;

// Installs the handler once for the process; called before the first handle is made.
void install_fork_guard();

inline std::uint64_t fork_generation() { return fork_generation_word.load(std::memory_order_relaxed); }

}  // namespace kvq::client

// Runs numbered items on a few helper threads and the caller.
//
// Invariant: no thread holds work after run() returned. Helpers are started when first needed; a forked child finds
// none and starts its own. A second caller, while the pool is busy, runs its items alone rather than wait.
#pragma once

#include <cstddef>

namespace kvq {

// Calls run_item(context, i) for every i < items, from at most `threads` threads at once, this one included.
void run_items(std::size_t items, int threads, void (*run_item)(void* context, std::size_t item), void* context);

}  // namespace kvq

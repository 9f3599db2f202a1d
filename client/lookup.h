// Lookup of the longest cached prefix, in shared memory.
//
// Invariant: no RPC, no hold, no side effect. A hit is a hint: a page counts only while its directory entry carries the
// hit's generation and is readable, and attaching it checks again in the daemon.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/model.h"
#include "client/prefix_keys.h"

namespace kvq::client {

struct CachedPrefix {
  std::vector<Key> keys;        // of the cached pages, in order
  std::vector<PrefixHit> hits;  // as many
  std::uint64_t dense_pages = 0, quantized_pages = 0, host_pages = 0;
};

// dense_only: stops at the first page that is not dense on the device.
CachedPrefix find_cached_prefix(const Model& model, std::span<const std::uint32_t> tokens,
                                std::span<const ExtraKey> extra_keys, bool dense_only);

// How many of the first pages of `prefix` are still there.
std::size_t still_cached(const Model& model, const CachedPrefix& prefix, bool dense_only);

}  // namespace kvq::client

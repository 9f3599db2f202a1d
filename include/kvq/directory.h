// The directory: what turns a page id into a place, read by every kernel, written by the daemon alone.
//
// Invariant: one aligned 64-bit load of an entry is a consistent view. An entry a reader has loaded inside a step stays
// valid until that step ends, because the daemon reaps a retired slot only after every older step (docs/epochs.md).
//
//   DirectoryHeader (4096 bytes)
//   +-----------------------------+ 0
//   | magic "KVQDIR\0\1" version  |
//   | capacity tenant epoch ...   |
//   +-----------------------------+ 4096
//   | entry 0: the null page      |  8 bytes each, std::atomic<uint64_t>, capacity entries
//   | entry 1 ...                 |
//   +-----------------------------+
//
//   entry:  63        48 47   44 43   40 39                    0
//          | generation | format | state | offset / 256 bytes   |
#pragma once

#include <atomic>

#include "kvq/types.h"

namespace kvq {

struct Entry {
  std::uint16_t generation;  // changes when a page id is used again
  Format format;
  EntryState state;
  std::uint64_t offset_bytes;  // from the arena's base; a multiple of 256

  friend constexpr bool operator==(const Entry&, const Entry&) = default;
};

inline constexpr std::uint64_t kOffsetBits = 40;
inline constexpr std::uint64_t kOffsetMask = (std::uint64_t{1} << kOffsetBits) - 1;

KVQ_HD constexpr std::uint64_t pack_entry(const Entry& e) {
  return (std::uint64_t{e.generation} << 48) | (std::uint64_t{static_cast<std::uint8_t>(e.format)} << 44) |
         (std::uint64_t{static_cast<std::uint8_t>(e.state)} << 40) | ((e.offset_bytes / kOffsetUnitBytes) & kOffsetMask);
}

KVQ_HD constexpr Entry unpack_entry(std::uint64_t word) {
  return Entry{static_cast<std::uint16_t>(word >> 48), static_cast<Format>((word >> 44) & 15),
               static_cast<EntryState>((word >> 40) & 15), (word & kOffsetMask) * kOffsetUnitBytes};
}

inline constexpr std::uint64_t kDirectoryMagic = 0x0100'5249'4451'564b;  // "KVQDIR\0\1" in memory

// Daemon: writes. Clients: map read-only. `epoch` is this tenant's global epoch (only this tenant's slots are guarded by
// it, so no timing crosses tenants). How it is read and advanced: kvq/step_protocol.h.
struct alignas(64) DirectoryHeader {
  std::uint64_t magic;
  std::uint32_t version;        // kContractVersion
  std::uint32_t capacity;       // entries, the null page included
  TenantId tenant;
  std::uint32_t reserved0;
  std::uint64_t arena_bytes;    // address range to reserve: max slabs x slab_bytes
  std::uint64_t slab_bytes;
  std::uint64_t prefix_buckets; // size of the prefix table (prefix_table.h), a power of two
  alignas(64) std::atomic<std::uint64_t> epoch;
  std::uint8_t reserved1[4096 - 72];
};
static_assert(sizeof(std::atomic<std::uint64_t>) == 8 && std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(offsetof(DirectoryHeader, epoch) == 64);
static_assert(sizeof(DirectoryHeader) == 4096);

using DirectoryEntry = std::atomic<std::uint64_t>;  // a packed Entry

constexpr std::uint64_t directory_bytes(std::uint32_t capacity) {
  return sizeof(DirectoryHeader) + std::uint64_t{capacity} * sizeof(DirectoryEntry);
}

}  // namespace kvq

// Writing directory entries in device memory, in stream order.
//
// Invariant: each entry is written by one aligned 64-bit store after everything that was in the stream before it, so a
// running kernel that loads an entry sees the old word or the new one, and with the new one the bytes of the page that
// it names. Calls return at once, except that a copy of many entries may wait until the driver has taken it over.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/cuda/cuda_kernels.h"

namespace kvq::cuda {

struct EntryWrite {
  std::uint32_t index;
  std::uint64_t word;
};

// How the words get there. Memory operations of the stream run no compute kernel, so they cost other processes of the
// GPU no change of context; the kernel is for devices without them; the copy is for writes to consecutive entries, many
// at once.
enum class EntryPath { automatic, memory_operations, kernel, copy };

// `entries` is the device's copy of a directory; the caller knows its capacity. The order of writes in one call is not
// defined. Errors: invalid_argument (copy of entries that are not consecutive), system, context_lost.
Result<void> write_entries(std::uint64_t* entries, std::span<const EntryWrite> writes, Stream stream,
                           EntryPath path = EntryPath::automatic);

}  // namespace kvq::cuda

// The checksum of a page: XXH3, 64 bits, over all bytes of its slot.
//
// Invariant: it finds damage, not malice: whoever can write a page can write one with the same checksum.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

namespace kvq {

inline std::uint64_t page_checksum(const std::byte* page, std::uint64_t bytes) {
  return XXH3_64bits(page, static_cast<std::size_t>(bytes));
}

}  // namespace kvq

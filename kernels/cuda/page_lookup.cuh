// A page number to the address of a block, with every way in which that can fail.
//
// Invariant: one relaxed load of the entry per page, past the first-level cache, so that a replayed graph sees what the
// daemon has published; nothing that was not checked becomes an address.
#pragma once

#include "kernels/cuda/attend_params.h"
#include "kernels/cuda/memory.cuh"

namespace kvq::cuda {

// What a reader finds: a format's number, or one of these. `values`: the second piece of a page that comes in two.
enum class Kind : std::uint32_t {
  dense = 1,
  int4 = 2,
  int4_k4 = 3,
  int4_k8 = 4,
  k8v4 = 5,
  null = 6,
  fault = 7,
  values = 8
};
KVQ_HD constexpr bool is_quantized(Kind kind) { return kind >= Kind::int4 && kind <= Kind::k8v4; }
// Bytes of a quantized page's block.
template <std::uint32_t kD>
KVQ_HD constexpr std::uint32_t block_bytes_of(Kind kind) {
  return kind == Kind::int4      ? block_offsets(Format::int4, kD).end
         : kind == Kind::int4_k4 ? block_offsets(Format::int4_k4, kD).end
         : kind == Kind::int4_k8 ? block_offsets(Format::int4_k8, kD).end
                                 : block_offsets(Format::k8v4, kD).end;
}
static_assert(static_cast<std::uint32_t>(Kind::k8v4) == static_cast<std::uint32_t>(Format::k8v4));
inline constexpr std::uint64_t kKindMask = 15;  // in the low bits of a block's address, which is a multiple of 128

// Plain loads and stores, since not every machine has atomics on host memory: of faults at the same time any one stays.
__device__ inline void report_fault(const PageTable& pages, Errc code, std::uint32_t index, std::uint32_t page) {
  if (load_host_word(pages.fault) == 0) store_host_word(pages.fault, pack_fault(code, pages.layer, index, page));
}

struct PageWord {
  std::uint64_t word = 0;  // a packed entry whose state is open, sealed or null
  std::uint32_t page = 0;
  Errc code = Errc::ok;
};

// `number` is an alias where there are aliases, else a page id.
__device__ __forceinline__ PageWord find_page(const PageTable& pages, std::int64_t number) {
  constexpr std::uint64_t kNull = std::uint64_t{static_cast<std::uint8_t>(EntryState::null)} << 40;
  if (pages.aliases != nullptr && number >= 0) {
    number = number < pages.alias_count ? __ldcg(pages.aliases + number) : 0;
  }
  if (number == 0) return {kNull, 0, Errc::ok};
  const auto page = static_cast<std::uint32_t>(number);
  if (number < 0 || number >= pages.capacity) return {kNull, page, Errc::stale_id};
  const std::uint64_t word = load_entry_word(pages.entries + number);
  switch (unpack_entry(word).state) {
    case EntryState::open:
    case EntryState::sealed:
    case EntryState::null:
      return {word, page, Errc::ok};
    case EntryState::free:
      return {word, page, Errc::stale_id};
    default:
      return {word, page, Errc::lost_page};
  }
}

// The address of `head`'s block, its Kind in the low bits. A fault has no address, and is reported if `reports`.
__device__ __forceinline__ std::uint64_t find_block(const PageTable& pages, std::int64_t number, std::uint32_t head,
                                                    std::uint32_t sequence, bool reports) {
  PageWord found = find_page(pages, number);
  const Entry entry = unpack_entry(found.word);
  if (found.code == Errc::ok && entry.state == EntryState::null) return static_cast<std::uint64_t>(Kind::null);
  const auto index = static_cast<std::uint32_t>(entry.format);
  if (found.code == Errc::ok && (index >= kFormatCount || pages.formats[index].format == Format::none)) {
    found.code = Errc::wrong_layout;
  }
  if (found.code != Errc::ok) {
    if (reports) report_fault(pages, found.code, sequence, found.page);
    return static_cast<std::uint64_t>(Kind::fault);
  }
  const LayerFormat& at = pages.formats[index];
  return (pages.arena + entry.offset_bytes + at.offset_bytes + std::uint64_t{head} * at.head_bytes) |
         static_cast<std::uint64_t>(at.format);
}

}  // namespace kvq::cuda

// Ids, units and small enums that every room shares.
//
// Invariant: this header needs no library, allocates nothing and compiles in host and device code. Ids of different
// kinds never convert into one another, and a zero id always means "none" (page 0 is the null page).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define KVQ_HD __host__ __device__
#else
#define KVQ_HD
#endif

namespace kvq {

inline constexpr std::uint32_t kPageTokens = 64;         // tokens in a page; the int4 codec depends on it
inline constexpr std::uint64_t kOffsetUnitBytes = 256;   // arena offsets in a directory entry are in this unit
inline constexpr std::uint32_t kMaxLayers = 256;         // layers of one model (one rank)
inline constexpr std::uint32_t kMaxHeadDim = 256;
inline constexpr std::uint32_t kContractVersion = 1;     // every shared layout and the wire schema move together

enum class PageId : std::uint32_t {};       // index into a tenant's directory; stable while the page lives
enum class SlabId : std::uint32_t {};       // index of a slab in the arena; slab i starts at i * slab_bytes
enum class SlotIndex : std::uint32_t {};    // index of a slot inside one slab
enum class LayoutId : std::uint32_t {};     // index into the daemon's layout registry (model geometry x format)
enum class TenantId : std::uint32_t {};
enum class SessionId : std::uint32_t {};
enum class SequenceId : std::uint32_t {};   // chosen by the client, unique inside its session
enum class Epoch : std::uint64_t {};        // per tenant; starts at 1, so that 0 can mean "no step"

inline constexpr PageId kNullPage{0};       // reads as zeros, swallows writes

// The id's number, for indexing and printing.
template <typename Id>
KVQ_HD constexpr auto raw(Id id) {
  return static_cast<std::underlying_type_t<Id>>(id);
}

// Element type of a dense page, as the model writes it.
enum class Dtype : std::uint8_t { fp16 = 0, bf16 = 1 };

// What a page's bytes mean. The numbers are stored in directory entries and page records: never renumber.
enum class Format : std::uint8_t {
  none = 0,
  dense = 1,    // 16-bit, as written
  int4 = 2,     // keys per channel, values per token, 4-bit codes, fp16 scale and midpoint
  int4_k4 = 3,  // int4 with the 4 key channels of largest range kept 16-bit
  int4_k8 = 4,  // int4 with 8 such channels
  k8v4 = 5,     // 8-bit keys, 4-bit values
};
inline constexpr std::uint32_t kFormatCount = 6;

// What a reader may do with a page. The numbers are stored in directory entries: never renumber.
enum class EntryState : std::uint8_t {
  free = 0,    // no page; reading it is a bug
  open = 1,    // dense, its session may write it
  sealed = 2,  // immutable, resident on the device
  host = 3,    // immutable, in host memory; restore before reading
  lost = 4,    // content is gone; readers get a typed error
  null = 5,    // the null page
};

// Pressure, from the watermarks. Ordered: a higher level includes the remedies of the lower ones.
enum class PressureLevel : std::uint8_t { calm = 0, quantize = 1, evict = 2, refuse = 3 };

}  // namespace kvq

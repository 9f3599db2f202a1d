// The prefix table: which sealed page holds the content that a key names. Read by clients without RPC.
//
// Invariant: the daemon is the only writer; a bucket's value is zero while its tag is being written, so a reader that sees
// the same non-zero value before and after comparing the tag has read one consistent bucket. A hit is only a hint: the
// daemon's attach checks page, generation and the full 32-byte key before it takes a hold.
//
//   PrefixHeader (64 bytes) | Bucket[buckets] (32 bytes each, linear probing, at most kMaxProbe away from home)
//
// A key is SHA-256 (DESIGN: "Sharing"). The root key covers everything that is not tokens:
//   root = SHA256("kvq root 1\0" | salt[32] | fingerprint[32] | page_tokens u32 | layers u32 | LayerSpec bytes...)
//   page = SHA256("kvq page 1\0" | parent[32] | token ids u32[64] | tag 'x' per extra key: u32 length, bytes)
// Every field has its domain tag and length, so that no two different inputs concatenate to the same bytes.
#pragma once

#include <array>
#include <atomic>

#include "kvq/memory_site.h"
#include "kvq/types.h"

namespace kvq {

using Key = std::array<std::uint8_t, 32>;

inline constexpr std::uint64_t kPrefixMagic = 0x0100'5846'5051'564b;  // "KVQPFX\0\1" in memory
inline constexpr std::uint32_t kMaxProbe = 64;
inline constexpr char kRootTag[] = "kvq root 1";  // hashed with its final zero
inline constexpr char kPageTag[] = "kvq page 1";

struct alignas(64) PrefixHeader {
  std::uint64_t magic;
  std::uint32_t version;  // kContractVersion
  TenantId tenant;
  std::uint64_t buckets;  // a power of two
  std::uint8_t reserved[64 - 24];
};
static_assert(sizeof(PrefixHeader) == 64);

// value: 0 = never used (ends a probe), kTombstone = removed, otherwise generation << 32 | page id (page ids are never 0).
struct Bucket {
  std::atomic<std::uint64_t> tag[2];  // first 16 bytes of the key, as two little-endian words
  std::atomic<std::uint64_t> value;
  std::uint64_t reserved;
};
static_assert(sizeof(Bucket) == 32);
inline constexpr std::uint64_t kTombstone = ~std::uint64_t{0};

// The two halves of a bucket's protocol. The daemon names an empty or removed bucket:
template <typename Memory, typename B>
void name_bucket(B& bucket, std::uint64_t tag0, std::uint64_t tag1, std::uint64_t value) {
  Memory::store(bucket.value, 0, std::memory_order_relaxed, Site::plain);
  Memory::fence(std::memory_order_release, Site::bucket_cleared);
  Memory::store(bucket.tag[0], tag0, std::memory_order_relaxed, Site::plain);
  Memory::store(bucket.tag[1], tag1, std::memory_order_relaxed, Site::plain);
  Memory::store(bucket.value, value, std::memory_order_release, Site::bucket_named);
}

// A reader's look at one: its value, and whether it stands under this tag.
struct BucketView {
  std::uint64_t value;
  bool matches;
};
template <typename Memory, typename B>
BucketView view_bucket(const B& bucket, std::uint64_t tag0, std::uint64_t tag1) {
  const std::uint64_t value = Memory::load(bucket.value, std::memory_order_acquire, Site::bucket_seen);
  if (value == 0 || value == kTombstone || Memory::load(bucket.tag[0], std::memory_order_relaxed, Site::plain) != tag0 ||
      Memory::load(bucket.tag[1], std::memory_order_relaxed, Site::plain) != tag1) {
    return {value, false};
  }
  Memory::fence(std::memory_order_acquire, Site::bucket_checked);
  return {value, Memory::load(bucket.value, std::memory_order_relaxed, Site::plain) == value};
}

struct PrefixHit {
  PageId page = kNullPage;
  std::uint16_t generation = 0;
};

inline std::uint64_t key_word(const Key& key, int i) {
  std::uint64_t w = 0;
  for (int b = 7; b >= 0; --b) w = (w << 8) | key[static_cast<std::size_t>(i * 8 + b)];
  return w;
}

// Any thread, any process; wait-free. Returns page 0 when the key is not there.
inline PrefixHit find_prefix(const PrefixHeader& header, const Bucket* buckets, const Key& key) {
  const std::uint64_t tag0 = key_word(key, 0), tag1 = key_word(key, 1), mask = header.buckets - 1;
  for (std::uint32_t i = 0; i < kMaxProbe; ++i) {
    const BucketView seen = view_bucket<SharedMemory>(buckets[(key_word(key, 2) + i) & mask], tag0, tag1);
    if (seen.value == 0) return {};
    if (!seen.matches) continue;
    return {PageId{static_cast<std::uint32_t>(seen.value)}, static_cast<std::uint16_t>(seen.value >> 32)};
  }
  return {};
}

constexpr std::uint64_t prefix_table_bytes(std::uint64_t buckets) { return sizeof(PrefixHeader) + buckets * sizeof(Bucket); }

}  // namespace kvq

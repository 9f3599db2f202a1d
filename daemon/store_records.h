// The store's own durable records, beside those of daemon/core: what a next daemon needs to know of the whole arena, of
// tenants, sessions and slabs.
//
// Invariant: plain data in daemon-private memory files (shm/table_file.h), all zero when unused; an id or `live` that
// is not zero says that the record counts, and is written last.
#pragma once

#include "daemon/shm/session_segment.h"
#include "daemon/store.h"
#include "kvq/types.h"

namespace kvq {

inline constexpr std::uint32_t kMaxTenants = 1024;
inline constexpr std::uint32_t kMaxSessionRecords = 4096;  // the most that max_sessions may say
inline constexpr std::uint32_t kJournalWords = 128 * 1024;

struct alignas(64) RootRecord {
  std::uint64_t instance;                 // random; not 0
  std::uint64_t arena_bytes, slab_bytes;  // arena: its range of addresses
  std::uint64_t chunks;                   // records in the chunk table
  std::uint32_t max_pages, max_sequences;
  std::uint32_t last_session;  // ids up to here have been used
  std::uint32_t page_tokens;
  char device[16];
  char writer[16];  // version of the kvqd that made it, for messages
  std::uint64_t live;
  std::uint64_t size_bytes;   // of the arena as it is to be; 0: the range
  std::uint64_t asked_bytes;  // what the configuration said when the size was last taken from it; 0: the range
};
static_assert(sizeof(RootRecord) == 128);

struct alignas(64) TenantRecord {
  char name[48];  // ends with a zero
  std::uint8_t salt[32];
  std::uint64_t quota_bytes;
  double share;
  std::uint32_t floor_dense;
  std::uint32_t live;
};
static_assert(sizeof(TenantRecord) == 128);

inline constexpr std::uint16_t kSessionMapsSlabs = 1;
inline constexpr std::uint16_t kSessionFloorDense = 2;
inline constexpr std::uint16_t kSessionReady = 4;
inline constexpr std::uint16_t kSessionClosed = 8;  // it lost its connection: nobody may come back for it
inline constexpr std::uint16_t kSessionEvicted = 16;

struct alignas(64) SessionRecord {
  SessionId id;  // 0: unused
  TenantId tenant;
  std::uint32_t pid, uid;
  std::uint16_t model, flags;
  std::uint32_t credits_target;
  RingCounts counts;
  std::uint64_t refused, lost_pages;
  SessionToken token;
  std::uint8_t fingerprint[32];
  char label[72];  // ends with a zero
  std::uint8_t reserved[256 - 56 - 16 - 32 - 72];
};
static_assert(sizeof(SessionRecord) == 256);

struct SlabRecord {
  TenantId tenant;
  LayoutId layout;
  std::uint32_t ready;  // every session has it mapped: pages may be in it
  std::uint32_t live;
  std::uint64_t serial;  // Device::slab_serial
};
static_assert(sizeof(SlabRecord) == 24);

}  // namespace kvq

// The session segment: the memory through which one client process and the daemon talk without RPC.
//
// Invariant: every word has exactly one writing side, named beside it; nothing here is a lock. The daemon trusts nothing it
// reads from it: indices are masked, lengths and ids checked, epochs clamped, and the worst a client can do is lose its own
// pages. The memfd's size is sealed, so that nobody can truncate it under the other side.
//
//   0        SegmentHeader      4096   written once by the daemon
//   4096     DaemonWords        4096   daemon writes: credits, pressure
//   8192     StepSlot[64]       4096   client writes (on a GPU the GPU writes `ended`)
//   12288    Ring magazine      128 + 4096 * 8    daemon -> client: page ids ready to be written ("credits")
//   45184    Ring commands      128 + 4096 * 64   client -> daemon
//   307456   end, rounded up to 311296
#pragma once

#include <atomic>

#include "kvq/types.h"

namespace kvq {

inline constexpr std::uint64_t kSegmentMagic = 0x0100'4745'5351'564b;  // "KVQSEG\0\1" in memory
inline constexpr std::uint32_t kStepSlots = 64;                        // most steps one session may have in flight
inline constexpr std::uint32_t kMagazineSlots = 4096;                  // most credits one session may hold
inline constexpr std::uint32_t kCommandSlots = 4096;
inline constexpr std::uint32_t kMaxSequences = 65536;                  // of one session; SequenceId is below this, never 0

struct SegmentHeader {
  std::uint64_t magic;
  std::uint32_t version;  // kContractVersion
  SessionId session;
  TenantId tenant;
  std::uint32_t owner_pid;       // as the daemon sees it
  std::uint64_t bytes;           // kSegmentBytes
  std::uint8_t token[16];        // proves the session's identity when a client reconnects
  std::uint8_t reserved[4096 - 48];
};
static_assert(sizeof(SegmentHeader) == 4096);

// Written by the daemon only.
struct DaemonWords {
  alignas(64) std::atomic<std::uint32_t> pressure_level;     // PressureLevel of this session's tenant
  std::atomic<std::uint32_t> credits_wanted_back;            // pages the daemon asks the session to return
  std::atomic<std::uint32_t> credits_target;                 // pages the daemon tries to keep in the magazine
  std::atomic<std::uint32_t> draining;                       // 1: nothing new is admitted
  std::atomic<std::uint32_t> revoked;                        // 1: the connection is lost; no step may begin, open ones may end
  alignas(64) std::atomic<std::uint64_t> lost_pages;         // count of this session's pages lost so far
  std::atomic<std::uint64_t> commands_refused;               // commands that named something the session does not own
  std::uint8_t reserved[4096 - 128];
};
static_assert(sizeof(DaemonWords) == 4096);

// One step in flight. Step serial s (1, 2, 3 ...) uses slot s % kStepSlots. Open while begun != ended.
// How it is written and scanned: kvq/step_protocol.h. On a GPU a stream-ordered write stores `ended`.
struct alignas(64) StepSlot {
  std::atomic<std::uint64_t> epoch;
  std::atomic<std::uint64_t> begun;
  std::atomic<std::uint64_t> ended;
  // The newest step of the slot that the client ended itself because the GPU's context was lost: what it wrote may be
  // missing, so its pages are never shared. Stored before `ended`.
  std::atomic<std::uint64_t> cut_short;
  std::uint8_t reserved[64 - 32];
};
static_assert(sizeof(StepSlot) == 64);

// Single producer, single consumer (kvq/ring_protocol.h). `produced` and `consumed` only grow; item i is at i % N.
template <typename T, std::uint32_t N>
struct Ring {
  static_assert((N & (N - 1)) == 0);
  alignas(64) std::atomic<std::uint64_t> produced;
  alignas(64) std::atomic<std::uint64_t> consumed;
  T item[N];
};

// A page the session may write: reserved, charged, open, dense.
struct MagazineItem {
  PageId page;
  std::uint16_t generation;
  std::uint16_t reserved;
};
static_assert(sizeof(MagazineItem) == 8);

// The numbers cross processes: never renumber. `sequence` is always the sequence acted on.
enum class CommandKind : std::uint16_t {
  open = 1,          // a new, empty, running sequence. flags: kFormatFloorDense
  take = 2,          // magazine page `page` becomes page `index` of the sequence (index = its present page count)
  commit = 3,        // `index` tokens of the sequence are final (recency and window policy)
  seal = 4,          // page `page` at `index` is complete: sealed once step `serial` of session `argument` (0: own) has ended.
                     // key: its prefix key; flags: kPrivate keeps it out of the prefix table. Commits its tokens, too
  truncate = 5,      // the first `index` pages stay
  drop_before = 6,   // pages below `index` are given up; their places in the block table become the null page
  fork = 7,          // `sequence` is new and shares the first `index` pages (all sealed) of sequence `argument`
  park = 8,          // not running: its pages may be evicted
  release = 9,       // the sequence ends
  return_credit = 10,  // unused magazine page `page` goes back
};

inline constexpr std::uint16_t kPrivate = 1;
inline constexpr std::uint16_t kFormatFloorDense = 2;  // pages of this sequence are never quantized while it holds them

struct Command {
  CommandKind kind;
  std::uint16_t flags;
  SequenceId sequence;
  PageId page;
  std::uint16_t generation;
  std::uint16_t reserved;
  std::uint32_t index;
  std::uint32_t argument;
  std::uint64_t serial;
  std::uint8_t key[32];
};
static_assert(sizeof(Command) == 64);

struct Segment {
  SegmentHeader header;
  DaemonWords daemon;
  StepSlot step[kStepSlots];
  Ring<MagazineItem, kMagazineSlots> magazine;
  Ring<Command, kCommandSlots> commands;
};
static_assert(offsetof(Segment, daemon) == 4096 && offsetof(Segment, step) == 8192);
static_assert(offsetof(Segment, magazine) == 12288 && offsetof(Segment, commands) == 45184);

inline constexpr std::uint64_t kSegmentBytes = (sizeof(Segment) + 4095) / 4096 * 4096;
static_assert(kSegmentBytes == 311296);

}  // namespace kvq

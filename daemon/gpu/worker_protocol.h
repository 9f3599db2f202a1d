// What kvqd and its GPU worker say to each other: messages over a socket pair, and rings in one memory file.
//
// Invariant: one kvqd, one worker, one GPU. Messages (SOCK_SEQPACKET, at most one descriptor each) make and place
// memory; the rings carry jobs, their results and directory entries. Each ring has one producer and one consumer; a
// slot belongs to the producer until its count is stored (release) and to the consumer until its own count is. Neither
// side ever waits for the other: a full ring is tried again later. The worker is trusted to be kvq's own, but it may
// die or stop at any instruction, so kvqd counts on nothing that has not been answered. A worker ends when its socket
// does.
//
//   kvqd                                  worker
//    | spawn, fd 3: socket, 4: rings,       |
//    |        5, 6: bells (eventfds)        |
//    |                          <-- hello   | GPU, driver, bytes, granularity, overhead
//    | begin (slab_bytes, slabs) -->        |
//    | adopt, adopt_mirror -->              | what an earlier worker made
//    |                          <-- adopted, failed
//    | fill (count) -->                     |
//    |                          <-- spare   | one physical slab, zeroed, with its descriptor: as many as fit, then
//    `ready` | place / release -->                  | | mirror -->                           | | <-- mirror_made
//    (descriptor), failed | model -->                            | | jobs, entries ==> rings              | ==> done
//    ring, `written`
//
// One order holds between messages and rings: what was sent before a slot was produced is handled before that slot. So
// the worker reads the counts of the rings first, then its socket until it is empty, and only then the slots up to
// those counts.
#pragma once

#include <atomic>

#include "kvq/page_format.h"
#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq::gpu {

inline constexpr std::uint32_t kWorkerProtocol = 4;  // kvqd and kvqd-gpu are of one release
inline constexpr int kSocketFd = 3, kRingsFd = 4, kWorkerBellFd = 5, kDaemonBellFd = 6;
inline constexpr std::uint32_t kDeviceItself = ~std::uint32_t{0};  // index of a `failed` that ends the worker
inline constexpr std::uint32_t kAnySlab = ~std::uint32_t{0};       // index of a `spare` that fits every place
inline constexpr std::uint32_t kJobsInFlight = 4096;               // most that a worker has

enum class MessageKind : std::uint32_t {
  // worker -> kvqd
  hello,        // Hello
  spare,        // descriptor: a new zeroed slab. serial, index: the slab that it can become, or kAnySlab
  ready,        // no more spares come by themselves: `count` were made since the last `ready`; text says why fewer
  adopted,      // slab `index` or mirror `index` is in place; count: the kind that this answers (adopt, adopt_mirror)
  mirror_made,  // descriptor: the mirror of tenant `index`, all zero until entries come
  failed,       // what was asked of `index` cannot be done: code, native, text; count: the kind that this answers.
                // About the device itself: index ~0, and the worker ends
  // kvqd -> worker
  begin,         // bytes = slab_bytes, count = slabs of the arena: reserves its address range. The first message
  adopt,         // descriptor: slab `index`, serial: import it and map it at index * slab_bytes
  fill,          // make `count` more spares
  place,         // the spare with `serial` becomes slab `index`: map it
  release,       // slab `index`: unmap, give the memory back, then make `count` new spares
  mirror,        // make the mirror of tenant `index`, count = entries; their values come through the ring, all of them
  adopt_mirror,  // descriptor: the mirror of tenant `index`, count = entries
  model,         // Model: geometry number `index`, for jobs to name
};

// How a worker passes its memory to others. `vmm`: physical memory as descriptors, which outlives the worker and is
// mapped where and as the importer likes. `legacy`: one allocation for the arena and one for each mirror, as handle
// files; it is opened whole and writable, ends with the worker, and no other adopts it: that is answered by `failed`.
enum class Exporter : std::uint32_t { vmm, legacy };
inline const char* name(Exporter exporter) { return exporter == Exporter::legacy ? "legacy" : "vmm"; }

struct Message {
  MessageKind kind{};
  std::uint32_t index = 0;
  std::uint64_t serial = 0;  // of a slab's memory: random, never 0
  std::uint64_t bytes = 0;
  std::uint32_t count = 0;
  Errc code = Errc::ok;
  std::int32_t native = 0;  // driver code
  char text[196] = {};      // ends with a zero
};
static_assert(sizeof(Message) == 232);

// Follows a `hello` message in the same packet.
struct Hello {
  std::uint32_t protocol = kWorkerProtocol;
  std::int32_t driver = 0;  // 13000 = CUDA 13.0
  char device[16] = {};     // "cuda", or "host" for the stand-in that tests use
  char uuid[64] = {};       // "GPU-..." or "MIG-..."
  char name[64] = {};
  std::uint64_t total_bytes = 0;     // of the GPU
  std::uint64_t free_bytes = 0;      // when the worker had made its context
  std::uint64_t overhead_bytes = 0;  // what its context costs
  std::uint64_t granularity = 0;     // slab_bytes and mirrors are multiples of it
  std::uint32_t mps = 0;             // 1: the worker runs inside MPS
  Exporter exporter{};
};

// Follows a `model` message in the same packet.
struct Model {
  ModelGeometry geometry;
};

inline constexpr std::uint16_t kNoLayer = 0xffff;
inline constexpr float kNotMeasured = -1;

struct Job {
  std::uint64_t id = 0;
  std::uint32_t model = 0;
  Format from{}, to{};  // to == none: only sum up
  std::uint8_t has_checksum = 0;
  std::uint16_t measured = kNoLayer;  // a layer whose noise is wanted, dense before and quantized after
  std::uint64_t source_bytes = 0, destination_bytes = 0;  // from the arena's base
  std::uint64_t checksum = 0;
};

struct JobDone {
  std::uint64_t id = 0;
  Errc code{};
  std::int32_t native = 0;
  std::uint64_t checksum = 0;
  float noise = kNotMeasured;  // of the measured layer
};

// One directory entry for a mirror. `sequence` counts publications from 1.
struct EntryWrite {
  std::uint64_t sequence = 0;
  std::uint32_t tenant = 0;
  std::uint32_t page = 0;
  std::uint64_t entry = 0;
};

template <typename T, std::uint32_t kSlots>
struct WorkerRing {
  static_assert((kSlots & (kSlots - 1)) == 0);
  alignas(64) std::atomic<std::uint64_t> produced;
  alignas(64) std::atomic<std::uint64_t> consumed;
  alignas(64) T slot[kSlots];
};

// Producer: false when full. True, and `bell` says whether the consumer may sleep and must be rung.
template <typename T, std::uint32_t kSlots>
bool push(WorkerRing<T, kSlots>& ring, const T& value, bool& bell) {
  const std::uint64_t at = ring.produced.load(std::memory_order_relaxed);
  if (at - ring.consumed.load(std::memory_order_acquire) >= kSlots) return false;
  ring.slot[at % kSlots] = value;
  ring.produced.store(at + 1, std::memory_order_seq_cst);
  // It looks at `produced` again after each store of `consumed`, so only one that had caught up may be asleep.
  bell = bell || ring.consumed.load(std::memory_order_seq_cst) == at;
  return true;
}

struct WorkerRings {
  WorkerRing<Job, kJobsInFlight> jobs;             // kvqd produces
  WorkerRing<JobDone, kJobsInFlight> done;         // worker produces; never full, since no more are in flight
  WorkerRing<EntryWrite, 65536> entries;           // kvqd produces
  alignas(64) std::atomic<std::uint64_t> written;  // sequence up to which every kernel that starts now sees all entries
  alignas(64) std::atomic<std::uint32_t> urgent;   // kvqd: 1: somebody waits for memory, so no job waits for the pace
  alignas(64) std::atomic<std::uint64_t> beats;    // the worker's loop adds one each round, at least every 100 ms
};

}  // namespace kvq::gpu

// What the worker's loop needs of a GPU. One implementation for CUDA; tests have one that keeps "device memory" in memory files.
//
// Invariant: one thread calls it. Nothing waits for the device but where the comment says so; whatever fails, fails with the driver's
// code and a text, and what was there before is still there. After an error of kind `context_lost` nothing works any more: the
// worker ends and kvqd starts another.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "daemon/gpu/worker_protocol.h"
#include "daemon/shm/descriptor.h"

namespace kvq::gpu {

struct NewMemory {
  Descriptor exported;  // for importers; the backend keeps its own hold of the memory
  std::uint64_t serial = 0;
  std::uint32_t index = kAnySlab;  // the only place that it can have
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual Hello hello() const = 0;

  // Reserves the arena's address range: slab i is mapped at i * slab_bytes from its base.
  virtual Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) = 0;
  // A zeroed slab that has no place yet. no_memory: the GPU has no room for it.
  virtual Result<NewMemory> make_slab() = 0;
  // The memory of make_slab() with this serial becomes slab `slab`.
  virtual Result<void> place_slab(SlabId slab, std::uint64_t serial) = 0;
  // A slab that an earlier worker made. Used up. stale_id: it ended with that worker.
  virtual Result<void> adopt_slab(SlabId slab, std::uint64_t serial, Descriptor file) = 0;
  // Its place is free again, and its memory given back or kept for the next. No job reads or writes it.
  virtual void release_slab(SlabId slab) = 0;

  // Mirrors: `entries` 64-bit words. A new one is all zero (every page is free).
  virtual Result<Descriptor> make_mirror(TenantId tenant, std::uint32_t entries) = 0;
  virtual Result<void> adopt_mirror(TenantId tenant, std::uint32_t entries, Descriptor file) = 0;
  // Queues the writes in this order, in stream order after every job that done() has returned. The span is copied.
  virtual Result<void> write_entries(std::span<const EntryWrite> writes) = 0;
  // Highest sequence of which all kernels that start from now on see everything up to it.
  virtual std::uint64_t written() = 0;

  virtual void add_model(std::uint32_t number, const ModelGeometry& geometry) = 0;
  // Queues jobs; they run on a low-priority stream in batches of the backend's choice and at its pace. No job touches a
  // slot that another one, submitted and not yet returned, writes, unless it only sums up. The span is copied.
  virtual Result<void> submit(std::span<const Job> jobs) = 0;
  // Appends what has finished; `busy` tells whether anything is left. Errors: context_lost.
  virtual Result<bool> poll(std::vector<JobDone>& done) = 0;
  // Somebody waits for memory: until this is false again nothing that is queued waits for the pace.
  virtual void set_urgent(bool /*urgent*/) {}
  // With something left: how long there is no need to poll unless something is submitted or becomes urgent.
  virtual std::chrono::nanoseconds quiet() const { return std::chrono::microseconds(100); }
};

// kvqd-gpu: opens the GPU with this UUID (empty: the first visible one), with this exporter (none: vmm where the GPU can,
// else legacy). Errors name what was looked for and what there is.
Result<std::unique_ptr<Backend>> open_cuda(const char* uuid, std::optional<Exporter> exporter, std::string& why_not);

// The worker's life: answers kvqd over the fixed descriptors until the socket ends. The exit code of the process.
int run_worker(std::unique_ptr<Backend> backend);
// In its place when there is no backend: tells kvqd why.
int refuse_worker(const std::string& why_not);

}  // namespace kvq::gpu

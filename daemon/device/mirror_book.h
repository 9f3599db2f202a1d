// The mirrors of all tenants and what is on its way to them.
//
// Invariant: every write has a number of its own, publications and rewritten entries alike, and leaves here in the
// order of these numbers. `seen` covers a publication only when this worker, or one before it, has said that kernels
// see it: after a worker's end it stands still until the next one has been given every entry anew, since nobody knows
// which of the last writes the old one had made.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "daemon/device/worker_link.h"
#include "kvq/directory.h"

namespace kvq {

class MirrorBook {
 public:
  struct Mirror {
    const DirectoryEntry* entries = nullptr;
    std::uint32_t capacity = 0;
    Descriptor file;               // -1 until there is one
    bool asked = false;            // of the worker that runs now
    bool in_place = false;         // it said so
    std::uint64_t visible_at = 0;  // importers may have it once this write is seen
    std::uint64_t retry_ms = 0;    // when to ask again after a failure
    std::string problem;
  };

  void add(TenantId tenant, const DirectoryEntry* entries, std::uint32_t capacity, Descriptor adopted);
  // At once, if nothing waits before it. `link`: null while no worker serves.
  void publish(WorkerLink* link, TenantId tenant, PageId page, std::uint64_t entry);
  int descriptor(TenantId tenant, std::uint64_t seen) const;

  std::uint64_t count() const { return count_; }
  // `written`: what the worker says now, 0 while none serves.
  std::uint64_t seen(std::uint64_t written) const {
    return adopting_ == 0 && written >= rewritten_at_ ? std::max(seen_, written) : seen_;
  }
  bool caught_up(std::uint64_t written) const { return flowing_ && adopting_ == 0 && written >= rewritten_at_; }

  // A new worker has been asked to adopt: everything that exists follows anew.
  void restart(WorkerLink& link);
  // The worker is gone; `written` is the last that it said.
  void stop(std::uint64_t written);
  // Asks for mirrors that are not made yet, and sends what the ring takes.
  void advance(WorkerLink& link, std::uint64_t now_ms);
  void made(TenantId tenant, Descriptor file);
  void refused(TenantId tenant, std::string why, std::uint64_t now_ms);
  void adopted(TenantId tenant);
  std::string problem() const;  // of any mirror; empty: none
  std::uint64_t held_bytes(std::uint64_t granularity) const;  // of those that there are

 private:
  // Entries page .. page + count of a tenant as the directory has them by then, or the one value that was published.
  struct Write {
    std::uint64_t first_sequence = 0;
    TenantId tenant{};
    std::uint32_t page = 0, count = 0;
    std::uint64_t entry = 0;
    bool rewrites = false;
  };

  void rewrite(TenantId tenant, Mirror& mirror);
  bool send(WorkerLink& link, Write& write);
  void ask(WorkerLink& link, TenantId tenant, Mirror& mirror);
  std::map<TenantId, Mirror> mirrors_;
  std::deque<Write> waiting_;
  std::uint64_t count_ = 0;         // numbers given
  std::uint64_t seen_ = 0;          // what earlier workers had written for certain
  std::uint64_t rewritten_at_ = 0;  // number of the last rewritten entry after the worker's start
  // Mirrors that the worker has not said to have: it drops what is for one that it could not adopt, and counts it.
  std::uint32_t adopting_ = 0;
  bool flowing_ = false;  // a worker runs and has been told of the mirrors
};

}  // namespace kvq

// The planner: from a snapshot of who uses what, a bounded list of actions that make room.
//
// Invariant: plan() is a pure function; it names only pages and slabs that the snapshot lists, each at most once, at
// most max_actions of them. Cheaper remedies come first for everybody, and within one remedy the tenant furthest over
// its share pays first:
//   quantize idle pages -> merge part-full slabs -> quantize pages of running sequences -> drop cached pages
#pragma once

#include <vector>

#include "kvq/types.h"

namespace kvq {

enum class ActionKind : std::uint8_t {
  transcode,    // `page` to the cold format
  compact,      // `page` to another slab of the same layout, so that `slab` empties
  drop,         // `page`: cached, and by now without indexed children
  return_slab,  // `slab`: empty
};

struct Action {
  ActionKind kind;
  TenantId tenant{};
  PageId page = kNullPage;
  SlabId slab{};
  friend constexpr bool operator==(const Action&, const Action&) = default;
};

struct Victim {
  PageId page;
  std::uint64_t gain_bytes;
};

// A slab that compaction could empty, and those of its pages that are still to move.
struct MergeView {
  SlabId slab;
  std::vector<PageId> pages;
  std::uint64_t free_elsewhere;  // free slots in other ready slabs of the layout
  bool asked = false;            // by an operator: whether or not room is needed
};

struct EmptySlab {
  SlabId slab;
  bool spare;  // its layout has further free slots, or nobody asks for it
  std::uint64_t empty_ms;
};

// How much has to be freed, beyond what is on its way and what empty slabs hold.
struct Need {
  std::uint64_t quantize_bytes = 0;  // by transcodes
  std::uint64_t evict_bytes = 0;     // also by drops
};

struct TenantView {
  TenantId id{};
  std::uint64_t slab_bytes = 0;  // memory it holds
  double share = 1.0;
  Need need;                          // of its own quota
  std::uint32_t need_ids = 0;         // page ids: only drops free them
  std::vector<Victim> idle, running;  // dense, longest unused first
  std::vector<Victim> cached;         // longest unused first, children before parents
  std::vector<MergeView> merges;
  std::vector<EmptySlab> empty;
};

struct Snapshot {
  Need need;                    // of the whole arena
  bool short_of_slabs = false;  // somebody waits for a slab, or the level is evict: empty slabs go back at once
  std::uint32_t max_actions = 0;
  std::uint64_t slab_bytes = 0;
  std::uint64_t keep_empty_ms = 0;  // how long a spare empty slab is kept otherwise
  std::vector<TenantView> tenants;
};

std::vector<Action> plan(const Snapshot& snapshot);

}  // namespace kvq

// Limbo: slots that no directory entry will name again, waiting for the steps that may still read them.
//
// Invariant: an item is tagged with the tenant's epoch at its retirement, and the epoch advances after it. A step that
// began in a later epoch saw the directory without it, so an item may be reaped once every open step began later than
// its tag. Tags never fall, so the items are in order.
#pragma once

#include <deque>

#include "daemon/core/slab_pool.h"
#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq {

struct Retired {
  SlotRef slot;
  PageId page = kNullPage;  // the page id retires with its slot; null: only the slot (the page lives elsewhere now)
  Epoch tag{};
  std::uint64_t retired_ms = 0;
};

class Limbo {
 public:
  void retire(const Retired& item) {
    KVQ_ASSERT(items_.empty() || items_.back().tag <= item.tag);
    items_.push_back(item);
  }

  // Calls `reaped(item)` for each item that every step from `oldest_open` on cannot see. Returns how many.
  template <typename Reaped>
  std::uint32_t reap(Epoch oldest_open, Reaped reaped) {
    std::uint32_t count = 0;
    while (!items_.empty() && items_.front().tag < oldest_open) {
      const Retired item = items_.front();
      items_.pop_front();
      reaped(item);
      ++count;
    }
    return count;
  }

  std::size_t size() const { return items_.size(); }
  const std::deque<Retired>& items() const { return items_; }

 private:
  std::deque<Retired> items_;
};

}  // namespace kvq

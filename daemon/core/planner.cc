// One pass per remedy over the tenants, furthest over its share first, until the needs are met or the actions used up.
#include "daemon/core/planner.h"

#include <algorithm>

namespace kvq {
namespace {

void lower(std::uint64_t& bytes, std::uint64_t by) { bytes -= std::min(bytes, by); }

class Planner {
 public:
  explicit Planner(const Snapshot& snapshot) : s_(snapshot), arena_(snapshot.need) {
    for (const TenantView& t : s_.tenants) payers_.push_back({&t, t.need, t.need_ids});
    std::stable_sort(payers_.begin(), payers_.end(), [](const Payer& a, const Payer& b) {
      return static_cast<double>(a.view->slab_bytes) * b.view->share >
             static_cast<double>(b.view->slab_bytes) * a.view->share;
    });
  }

  std::vector<Action> run() {
    for (Payer& p : payers_) return_slabs(p);
    for (Payer& p : payers_) drop(p, [&p] { return p.need_ids > 0; });
    for (Payer& p : payers_) quantize(p, p.view->idle);
    for (Payer& p : payers_) merge(p);
    for (Payer& p : payers_) quantize(p, p.view->running);
    for (Payer& p : payers_) {
      drop(p, [this, &p] { return p.need.evict_bytes > 0 || arena_.evict_bytes > 0; });
    }
    return std::move(actions_);
  }

 private:
  struct Payer {
    const TenantView* view;
    Need need;
    std::uint32_t need_ids;
    std::size_t dropped = 0;  // of view->cached
  };

  bool full() const { return actions_.size() >= s_.max_actions; }
  bool wants_room(const Payer& p) const {
    return std::max({p.need.quantize_bytes, p.need.evict_bytes, arena_.quantize_bytes, arena_.evict_bytes}) > 0;
  }
  void freed(Payer& p, std::uint64_t bytes) {
    lower(p.need.quantize_bytes, bytes);
    lower(p.need.evict_bytes, bytes);
    lower(arena_.quantize_bytes, bytes);
    lower(arena_.evict_bytes, bytes);
  }

  void return_slabs(Payer& p) {
    for (const EmptySlab& e : p.view->empty) {
      if (full() || !e.spare || (!s_.short_of_slabs && e.empty_ms < s_.keep_empty_ms)) continue;
      actions_.push_back({ActionKind::return_slab, p.view->id, kNullPage, e.slab});
    }
  }

  void quantize(Payer& p, const std::vector<Victim>& victims) {
    for (const Victim& v : victims) {
      if (full() || !wants_room(p)) return;
      if (acted_on(p, v.page)) continue;  // a merge moves it
      actions_.push_back({ActionKind::transcode, p.view->id, v.page, SlabId{}});
      freed(p, v.gain_bytes);
    }
  }

  // A slab with more pages than actions are left is emptied over several plans: nothing new goes into the emptiest
  // slab.
  void merge(Payer& p) {
    for (const MergeView& m : p.view->merges) {
      if ((!m.asked && !wants_room(p)) || m.pages.empty() || m.pages.size() > m.free_elsewhere) continue;
      const bool touched = std::any_of(m.pages.begin(), m.pages.end(), [&](PageId page) { return acted_on(p, page); });
      if (touched) continue;
      for (PageId page : m.pages) {
        if (full()) return;
        actions_.push_back({ActionKind::compact, p.view->id, page, m.slab});
      }
      freed(p, s_.slab_bytes);
    }
  }

  template <typename Wanted>
  void drop(Payer& p, Wanted wanted) {
    for (; p.dropped < p.view->cached.size(); ++p.dropped) {
      const Victim& v = p.view->cached[p.dropped];
      if (full() || !wanted()) return;
      if (acted_on(p, v.page)) return;  // its parents follow it in the list, and may go only after it
      actions_.push_back({ActionKind::drop, p.view->id, v.page, SlabId{}});
      p.need_ids -= std::min(p.need_ids, 1u);
      freed(p, v.gain_bytes);
    }
  }

  bool acted_on(const Payer& p, PageId page) const {
    return std::any_of(actions_.begin(), actions_.end(),
                       [&](const Action& a) { return a.tenant == p.view->id && a.page == page; });
  }

  const Snapshot& s_;
  Need arena_;
  std::vector<Payer> payers_;
  std::vector<Action> actions_;
};

}  // namespace

std::vector<Action> plan(const Snapshot& snapshot) { return Planner(snapshot).run(); }

}  // namespace kvq

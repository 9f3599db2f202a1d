// What operators ask for: marked when they ask, carried out by the coming ticks, so that nobody waits for a long list.
//
// Invariant: what was marked is looked at again before it is touched: a page that is in use by then, and a slab that
// cannot be emptied any more, are let be. Marks end with the daemon.
#include <algorithm>
#include <unordered_map>

#include "daemon/store_state.h"

namespace kvq {

QuantizeReport StoreState::quantize(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                                    std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  QuantizeReport report;
  for (auto& t : tenants_) {
    if (id && t->id != *id) continue;
    if (!dry_run) t->asked.clear();
    for (VictimList list : {VictimList::idle, VictimList::running}) {
      if (list == VictimList::running && idle_ms > 0) continue;  // their sequences run: not idle
      for (PageId page = t->pages->first_victim(list); page != kNullPage; page = t->pages->next_victim(list, page)) {
        const PageRecord& r = t->pages->record(page);
        if (now_ms_ - r.last_use_ms < idle_ms) break;  // the list is by last use
        ++report.pages;
        report.bytes_before += layouts_->layout(r.model, Format::dense).page_bytes;
        report.bytes_after += layouts_->layout(r.model, config_.cold_format).page_bytes;
        if (!dry_run) t->asked.emplace_back(page, r.generation);
      }
    }
  }
  if (!dry_run) log("event=quantize_asked pages=" + std::to_string(report.pages));
  return report;
}

void StoreState::quantize_asked(TickReport& report) {
  for (auto& t : tenants_) {
    std::vector<Action> actions;
    while (!t->asked.empty() && actions.size() < config_.actions_per_tick) {
      const auto [page, generation] = t->asked.front();
      t->asked.pop_front();
      if (t->pages->record(page).generation != generation || t->pages->quantize_list(page) == VictimList::none)
        continue;
      actions.push_back({ActionKind::transcode, t->id, page, SlabId{}});
    }
    carry_out(actions, report);
    // Those that found no slot wait for a slab that is being mapped; without one they are given up.
    for (const Action& a : actions) {
      const PageRecord& r = t->pages->record(a.page);
      if (r.state == PageState::sealed && pool_.creating_slots(t->id, Layouts::id(r.model, config_.cold_format)) > 0) {
        t->asked.emplace_back(a.page, r.generation);
      }
    }
  }
}

// Cached pages that nobody used after `until_ms`: leaves, and those whose children are all among them, children first.
void StoreState::list_unwanted(const Tenant& t, std::uint64_t until_ms, std::vector<PageId>& out) const {
  std::unordered_map<std::uint32_t, std::uint32_t> children;  // of a parent, those that stay so far
  PageId leaf = t.pages->first_victim(VictimList::cached);
  for (; leaf != kNullPage; leaf = t.pages->next_victim(VictimList::cached, leaf)) {
    if (t.pages->record(leaf).last_use_ms > until_ms) break;  // the list is by last use
    PageId page = leaf;
    for (;;) {
      out.push_back(page);
      page = t.pages->record(page).parent;
      if (page == kNullPage) break;
      const PageRecord& r = t.pages->record(page);
      const PageUse& u = t.pages->use(page);
      if (--children.try_emplace(raw(page), u.children).first->second > 0) break;
      if (u.references > 0 || r.state != PageState::sealed || r.last_use_ms > until_ms) break;
    }
  }
}

DropReport StoreState::drop_cached(std::optional<TenantId> id, std::uint64_t idle_ms, bool dry_run,
                                   std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  DropReport report;
  for (auto& t : tenants_) {
    if (id && t->id != *id) continue;
    std::vector<PageId> pages;
    if (idle_ms <= now_ms_) list_unwanted(*t, now_ms_ - idle_ms, pages);
    if (!dry_run) {
      t->unwanted.clear();
      t->unwanted_until_ms = now_ms_ - std::min(now_ms_, idle_ms);
    }
    for (PageId page : pages) {
      const PageRecord& r = t->pages->record(page);
      ++report.pages;
      report.bytes += layouts_->layout(r.model, r.format).page_bytes;
      if (!dry_run) t->unwanted.emplace_back(page, r.generation);
    }
  }
  return report;
}

void StoreState::drop_unwanted(TickReport& report) {
  for (auto& t : tenants_) {
    std::uint32_t dropped = 0;
    while (!t->unwanted.empty() && dropped < config_.actions_per_tick) {
      const auto [page, generation] = t->unwanted.front();
      t->unwanted.pop_front();
      const PageRecord& r = t->pages->record(page);
      if (r.generation != generation || r.last_use_ms > t->unwanted_until_ms) continue;
      dropped += drop_page(*t, page) ? 1 : 0;
    }
    report.dropped_pages += dropped;
  }
}

// Slabs whose pages fit into those that stay, the emptiest of each layout first. The order is kept when they are
// emptied, so what is emptied later takes nothing in as long as there is room elsewhere.
void StoreState::list_emptied(const Tenant& t, std::vector<SlabId>& out) const {
  if (has_cut_off_reader(t)) return;
  std::map<LayoutId, std::vector<SlabId>> slabs;
  std::map<LayoutId, std::uint64_t> room;  // free slots in those that stay
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& s = pool_.slab(SlabId{i});
    if (s.state != SlabState::ready || s.tenant != t.id || s.live == 0) continue;
    slabs[s.layout].push_back(SlabId{i});
    room[s.layout] += s.free_slots();
  }
  for (auto& [layout, list] : slabs) {
    // Of equals the last: the pool fills the first.
    std::sort(list.begin(), list.end(), [this](SlabId a, SlabId b) {
      return std::pair{pool_.slab(a).live, raw(b)} < std::pair{pool_.slab(b).live, raw(a)};
    });
    for (SlabId slab : list) {
      const Slab& s = pool_.slab(slab);
      const std::uint64_t takes = std::uint64_t{s.free_slots()} + s.live;
      if (room[layout] < takes || !merge_of(t, slab, /*begun=*/false)) continue;
      room[layout] -= takes;
      out.push_back(slab);
    }
  }
}

CompactReport StoreState::compact(std::optional<TenantId> id, bool dry_run, std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  CompactReport report;
  for (auto& t : tenants_) {
    if (id && t->id != *id) continue;
    std::vector<SlabId> slabs;
    list_emptied(*t, slabs);
    if (!dry_run) t->emptying.clear();
    for (SlabId slab : slabs) {
      const Slab& s = pool_.slab(slab);
      ++report.slabs;
      report.pages += s.live;
      report.bytes += s.live * s.page_bytes;
      if (!dry_run) t->emptying.push_back({slab, device_.slab_serial(slab)});
    }
  }
  return report;
}

// Leaves at the front of each list a slab that can go on to be emptied.
void StoreState::settle_emptying() {
  for (auto& t : tenants_) {
    while (!t->emptying.empty()) {
      const auto [slab, serial] = t->emptying.front();
      const Slab& s = pool_.slab(slab);
      const bool same = s.state == SlabState::ready && s.tenant == t->id && device_.slab_serial(slab) == serial;
      if (same && s.live > 0 && merge_of(*t, slab, /*begun=*/true)) break;
      t->emptying.pop_front();
    }
  }
}

}  // namespace kvq

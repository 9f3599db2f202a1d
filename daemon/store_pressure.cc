// Pressure: what the planner gets to see, and what is done about its answer.
//
// Invariant: every action is checked again before it is carried out, and only tick() calls these functions.
#include <algorithm>
#include <cmath>

#include "daemon/store_state.h"

namespace kvq {
namespace {

constexpr std::uint64_t kLimboCountsMs = 1000;  // limbo older than this is not expected back soon
constexpr std::uint32_t kMaxBoost = 2;          // as far as evict

// Bytes in use above the end of `level`, whose start is `at`.
std::uint64_t excess(std::uint64_t used, std::uint64_t usable, double at, double relief) {
  const auto keep = static_cast<std::uint64_t>(std::max(0.0, at - relief) * static_cast<double>(usable));
  return used > keep ? used - keep : 0;
}

Need need_of(std::uint64_t used, std::uint64_t usable, PressureLevel level, const Watermarks& w, std::uint32_t boost,
             std::uint64_t wish_bytes, std::uint64_t coming) {
  Need need;
  if (level >= PressureLevel::quantize) need.quantize_bytes = excess(used, usable, w.quantize_at, w.relief);
  if (level >= PressureLevel::evict) need.evict_bytes = excess(used, usable, w.evict_at, w.relief);
  if (boost >= 1) need.quantize_bytes = std::max(need.quantize_bytes, wish_bytes);
  if (boost >= 2) need.evict_bytes = std::max(need.evict_bytes, wish_bytes);
  need.quantize_bytes -= std::min(need.quantize_bytes, coming);
  need.evict_bytes -= std::min(need.evict_bytes, coming);
  return need;
}

}  // namespace

void StoreState::measure_pressure() {
  const auto share = [](std::uint64_t used, std::uint64_t of) {
    return of == 0 ? 1.0 : static_cast<double>(used) / static_cast<double>(of);
  };
  const PressureLevel before = arena_level_;
  arena_level_ = next_level(arena_level_, share(pool_.used_slabs(), pool_.usable_slabs()), config_.watermarks);
  if (arena_level_ != before) {
    log(std::string("event=pressure level=") + name(arena_level_) + " slabs=" + std::to_string(pool_.used_slabs()) +
        " of=" + std::to_string(pool_.usable_slabs()));
  }
  for (auto& t : tenants_) {
    const TenantLedger::Account& a = ledger_.account(t->id);
    const PressureLevel old = t->level;
    t->level = a.quota_bytes == 0 ? PressureLevel::calm
                                  : next_level(t->level, share(a.charged_bytes, a.quota_bytes), config_.watermarks);
    if (t->level == old) continue;
    log(std::string("event=pressure level=") + name(t->level) + " tenant=" + t->spec.name +
        " bytes=" + std::to_string(a.charged_bytes) + " quota=" + std::to_string(a.quota_bytes));
  }
}

// Room that is being made for tenant `t`: the planner must not ask for it again.
std::uint64_t StoreState::coming_bytes(const Tenant& t) const {
  std::uint64_t bytes = t.leaving_bytes;
  for (const Retired& item : t.limbo.items()) {
    if (now_ms_ - item.retired_ms < kLimboCountsMs) bytes += pool_.slab(item.slot.slab).page_bytes;
  }
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& s = pool_.slab(SlabId{i});
    if (s.tenant == t.id && s.state == SlabState::draining) bytes += pool_.slab_bytes();
  }
  return bytes;
}

// Slabs that are kept for a while although they are empty: nobody has to be made smaller for what they hold.
std::uint64_t StoreState::kept_bytes(const Tenant& t) const {
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& s = pool_.slab(SlabId{i});
    if (s.tenant == t.id && s.state == SlabState::ready && s.used && s.empty()) bytes += pool_.slab_bytes();
  }
  return bytes;
}

// Unmet wishes count as pressure: one level more for as long as nothing is under way that will free room.
void StoreState::note_wishes() {
  bool arena_blocked = false, arena_moving = jobs_.size() > checks_in_flight_;
  for (auto& t : tenants_) {
    const bool blocked = t->obstacle == Obstacle::quota;
    const bool moving = coming_bytes(*t) > 0;
    arena_moving |= moving;
    arena_blocked |= t->obstacle == Obstacle::arena;
    if (!blocked) {
      t->boost = 0;
    } else if (!moving && t->boost < kMaxBoost) {
      ++t->boost;
    }
  }
  if (!arena_blocked) {
    arena_boost_ = 0;
  } else if (!arena_moving && arena_boost_ < kMaxBoost) {
    ++arena_boost_;
  }
}

Snapshot StoreState::snapshot() const {
  Snapshot out;
  std::uint64_t wish_bytes = 0, coming = 0;
  for (const auto& t : tenants_) {
    coming += coming_bytes(*t) + kept_bytes(*t);
    if (t->obstacle == Obstacle::arena) wish_bytes += t->wish_bytes;
    out.short_of_slabs |= t->obstacle != Obstacle::none;
  }
  const std::uint64_t slab = pool_.slab_bytes();
  out.need = need_of(pool_.used_slabs() * slab, pool_.usable_slabs() * slab, arena_level_, config_.watermarks,
                     arena_boost_, wish_bytes, coming);
  out.short_of_slabs |= arena_level_ >= PressureLevel::evict;
  out.max_actions = config_.actions_per_tick;
  out.slab_bytes = slab;
  out.keep_empty_ms = config_.keep_empty_ms;
  for (const auto& t : tenants_) out.tenants.push_back(view_of(*t));
  const bool arena_short = out.need.quantize_bytes > 0 || out.need.evict_bytes > 0;
  for (std::size_t i = 0; i < tenants_.size(); ++i) {
    TenantView& view = out.tenants[i];
    const Tenant& t = *tenants_[i];
    const bool drops = out.need.evict_bytes > 0 || view.need.evict_bytes > 0 || view.need_ids > 0;
    if (!arena_short && view.need.quantize_bytes == 0 && !drops && t.emptying.empty()) continue;
    std::map<std::uint16_t, std::uint64_t> room;  // by model: cold slots that can be had
    list_dense(t, VictimList::idle, room, view.idle);
    list_dense(t, VictimList::running, room, view.running);
    if (drops) list_cached(t, view.cached);
    list_merges(t, view);
  }
  return out;
}

TenantView StoreState::view_of(const Tenant& t) const {
  TenantView view;
  const TenantLedger::Account& a = ledger_.account(t.id);
  view.id = t.id;
  view.slab_bytes = a.charged_bytes;
  view.share = t.spec.share;
  const std::uint64_t wish = t.obstacle == Obstacle::quota ? t.wish_bytes : 0;
  view.need = need_of(a.charged_bytes, a.quota_bytes, t.level, config_.watermarks, t.boost, wish,
                      coming_bytes(t) + kept_bytes(t));
  view.need_ids = t.missing_ids - std::min(t.missing_ids, t.pages->count(PageState::retired));
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& s = pool_.slab(SlabId{i});
    if (s.state != SlabState::ready || s.tenant != t.id || !s.empty() || slab_use_[i].checks > 0) continue;
    const bool wished = t.wish_bytes > 0 && Layouts::format_of(s.layout) == Format::dense;
    const bool others = pool_.ready_free_slots(t.id, s.layout) > s.free_slots();
    // A fresh slab was made for something that comes once it is mapped.
    const std::uint64_t empty_ms = now_ms_ - s.empty_since_ms;
    const bool settled = s.used || empty_ms >= config_.keep_empty_ms;
    view.empty.push_back({SlabId{i}, settled && (!wished || others), empty_ms});
  }
  return view;
}

// Slots of the cold format that a transcode could have, now or once a slab is made and mapped.
std::uint64_t StoreState::cold_room(const Tenant& t, std::uint16_t model) const {
  const LayoutId cold = Layouts::id(model, config_.cold_format);
  const std::uint64_t have = std::uint64_t{pool_.ready_free_slots(t.id, cold)} + pool_.creating_slots(t.id, cold);
  Obstacle obstacle = Obstacle::none;
  if (!can_create_slab(t, true, &obstacle)) return have;
  return have + pool_.slab_bytes() / layouts_->layout(model, config_.cold_format).page_bytes;
}

// Dense victims, longest unused first, as many as there is room for in the cold format.
void StoreState::list_dense(const Tenant& t, VictimList list, std::map<std::uint16_t, std::uint64_t>& room,
                            std::vector<Victim>& out) const {
  PageId page = t.pages->first_victim(list);
  for (std::uint32_t n = 0; n < config_.actions_per_tick && page != kNullPage; ++n) {
    const std::uint16_t model = t.pages->record(page).model;
    const auto [entry, fresh] = room.try_emplace(model, 0);
    if (fresh) entry->second = cold_room(t, model);
    if (entry->second > 0) {
      --entry->second;
      out.push_back({page, layouts_->layout(model, Format::dense).page_bytes -
                               layouts_->layout(model, config_.cold_format).page_bytes});
    }
    page = t.pages->next_victim(list, page);
  }
}

// Leaves by last use, each followed by those parents that become leaves with it and were not used later than the next
// leaf.
void StoreState::list_cached(const Tenant& t, std::vector<Victim>& out) const {
  const auto gain = [&](PageId page) {
    const PageRecord& r = t.pages->record(page);
    return layouts_->layout(r.model, r.format).page_bytes;
  };
  PageId leaf = t.pages->first_victim(VictimList::cached);
  while (leaf != kNullPage && out.size() < config_.actions_per_tick) {
    const PageId next = t.pages->next_victim(VictimList::cached, leaf);
    const std::uint64_t until = next == kNullPage ? ~std::uint64_t{0} : t.pages->record(next).last_use_ms;
    PageId page = leaf;
    while (out.size() < config_.actions_per_tick) {
      out.push_back({page, gain(page)});
      page = t.pages->record(page).parent;
      if (page == kNullPage) break;
      const PageRecord& r = t.pages->record(page);
      const PageUse& u = t.pages->use(page);
      if (u.children != 1 || u.references > 0 || r.state != PageState::sealed || r.last_use_ms > until) break;
    }
    leaf = next;
  }
}

// Free slots of the slabs of its layout that hold pages, its own left out.
std::uint64_t StoreState::room_beside(const Tenant& t, SlabId slab) const {
  std::uint64_t slots = 0;
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& s = pool_.slab(SlabId{i});
    const bool same = s.tenant == t.id && s.layout == pool_.slab(slab).layout && SlabId{i} != slab;
    if (same && s.state == SlabState::ready && s.live > 0) slots += s.free_slots();
  }
  return slots;
}

// What has to move for `slab` to get empty; nothing when a page of it has to stay or finds no room in the others. Some
// may be on their way once it has `begun`.
std::optional<MergeView> StoreState::merge_of(const Tenant& t, SlabId slab, bool begun) const {
  MergeView merge{slab, {}, room_beside(t, slab)};
  for (PageId page : pool_.slab(slab).page) {
    if (page == kNullPage) continue;
    const PageRecord& r = t.pages->record(page);
    const PageUse& u = t.pages->use(page);
    // A transcode's destination is listed under the page that moves in; such a slab is filling, not emptying.
    if (r.slab != slab || u.immobile > 0 || u.failures >= kMaxFailures) return std::nullopt;
    if (begun && r.state == PageState::transcoding) continue;
    if (r.state != PageState::sealed) return std::nullopt;
    merge.pages.push_back(page);
  }
  if (merge.pages.size() > merge.free_elsewhere) return std::nullopt;
  return merge;
}

// For each of the tenant's layouts the emptiest slab, or the one that an operator wants to be empty.
void StoreState::list_merges(const Tenant& t, TenantView& view) const {
  std::map<LayoutId, SlabId> emptiest;
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& s = pool_.slab(SlabId{i});
    if (s.state != SlabState::ready || s.tenant != t.id || s.live == 0) continue;
    SlabId& slab = emptiest.try_emplace(s.layout, SlabId{i}).first->second;
    if (s.live < pool_.slab(slab).live) slab = SlabId{i};
  }
  std::optional<SlabId> asked;
  if (!t.emptying.empty()) asked = t.emptying.front().slab;
  if (asked) emptiest[pool_.slab(*asked).layout] = *asked;
  for (const auto& [layout, slab] : emptiest) {
    std::optional<MergeView> merge = merge_of(t, slab, slab == asked);
    if (!merge) continue;
    merge->asked = slab == asked;
    view.merges.push_back(std::move(*merge));
  }
}

// A session without its connection maps no new slab, but a step that it began before may read any page of the tenant.
bool StoreState::has_cut_off_reader(const Tenant& t) const {
  return std::any_of(t.sessions.begin(), t.sessions.end(), [this](SessionId id) {
    const Session& s = *find_session(id);
    return !s.connected && s.request.maps_slabs && s.segment.open_steps() > 0;
  });
}

void StoreState::carry_out(const std::vector<Action>& actions, TickReport& report) {
  for (const Action& action : actions) {
    Tenant& t = tenant_of(action.tenant);
    switch (action.kind) {
      case ActionKind::transcode:
      case ActionKind::compact: {
        const PageRecord& r = t.pages->record(action.page);
        if (r.state != PageState::sealed || has_cut_off_reader(t)) break;
        const bool moves = action.kind == ActionKind::compact;
        const Format to = moves ? r.format : config_.cold_format;
        bool started = start_transcode(t, action.page, to, moves ? std::optional(action.slab) : std::nullopt);
        if (!started && !moves && pool_.creating_slots(t.id, Layouts::id(r.model, to)) == 0) {
          Obstacle obstacle = Obstacle::none;
          if (!create_slab(t, r.model, to, true, &obstacle)) break;
          ++report.slabs_created;
          started = start_transcode(t, action.page, to, std::nullopt);
        }
        report.submitted += started ? 1 : 0;
        break;
      }
      case ActionKind::drop:
        report.dropped_pages += drop_page(t, action.page) ? 1 : 0;
        break;
      case ActionKind::return_slab:
        return_slab(action.slab);
        ++report.slabs_destroyed;
        break;
    }
  }
}

bool StoreState::drop_page(Tenant& t, PageId page) {
  if (!t.pages->droppable(page)) return false;
  t.prefix->erase(page);
  retire_page(t, page);
  commit();
  kill_point(KillPoint::page_dropped);
  ++counts_.drops;
  return true;
}

}  // namespace kvq

// The tick: the only place where room is made, in one fixed order.
//
// Invariant: a slot freed in this tick can be handed out in this tick, because rings are drained before jobs are
// finished, jobs before limbo is reaped, and limbo before wishes are served.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

TickReport StoreState::tick(std::uint64_t now_ms) {
  now_ms_ = std::max(now_ms_, now_ms);
  TickReport report;
  device_.advance(now_ms_);
  std::vector<SessionId> ids;
  for (const auto& [id, s] : sessions_) ids.push_back(id);
  for (SessionId id : ids) report.commands += drain_commands(id, now_ms_);
  for (auto& t : tenants_) settle_seals(*t);

  finish_jobs(report);
  settle_published();
  const auto limbo_size = [this] {
    std::size_t n = 0;
    for (const auto& t : tenants_) n += t->limbo.size();
    return n;
  };
  const std::size_t waiting = limbo_size();
  for (auto& t : tenants_) reap(*t, now_ms_);
  report.reaped_slots = static_cast<std::uint32_t>(waiting - limbo_size());
  note_steps(now_ms_);

  pool_.forget_hints();
  serve_wishes(report);
  make_slabs(report);
  measure_pressure();
  note_wishes();
  settle_emptying();
  carry_out(plan(snapshot()), report);
  quantize_asked(report);
  drop_unwanted(report);
  start_checks();
  submit_jobs();
  fill_targets(report);
  for (auto& [id, s] : sessions_) update_words(*s);
  deliver_notices();

  report.level = arena_level_;
  for (const auto& t : tenants_) report.level = std::max(report.level, t->level);
  report.busy = is_busy();
  KVQ_ASSERT(journal_.empty());
  return report;
}

// A step that stays open keeps everything in limbo that was retired since it began.
void StoreState::note_steps(std::uint64_t now_ms) {
  for (auto& [id, s] : sessions_) {
    const Epoch current = tenant_of(s->request.tenant).directory.epoch();
    const Epoch oldest = s->segment.oldest_open(current);
    const bool changed = oldest > current || oldest != s->oldest_step;
    if (changed && s->step_open) counts_.step.add(open_ms(*s));
    if (changed) s->oldest_since_ms = now_ms;
    s->step_open = oldest <= current;
    s->oldest_step = oldest;
  }
}

bool StoreState::may_have_pages(const Session& s) const {
  if (!s.ready || !s.connected || s.segment.broken()) return false;
  const Tenant& t = tenant_of(s.request.tenant);
  const bool blocks = t.limbo.size() > 0 && t.limbo.items().front().tag >= s.oldest_step;
  return !blocks || now_ms_ - s.oldest_since_ms < config_.step_deadline_ms;
}

// Somebody waits for memory that transcodes and drops have to free, or the next who asks will. The level evict alone is
// none of these: a full cache stays at it, and there is room for what is asked meanwhile.
bool StoreState::is_urgent() const {
  return arena_level_ == PressureLevel::refuse || std::any_of(tenants_.begin(), tenants_.end(), [](const auto& t) {
           return t->level == PressureLevel::refuse || t->obstacle > Obstacle::waiting;
         });
}

// Tenants with the least memory for their share first; within one, earlier wishes first.
std::vector<StoreState::Session*> StoreState::wishers() {
  std::vector<Session*> out;
  for (auto& [id, s] : sessions_) {
    if (s->wish > 0) out.push_back(s.get());
  }
  std::sort(out.begin(), out.end(), [this](const Session* a, const Session* b) {
    const TenantId x = a->request.tenant, y = b->request.tenant;
    const double use_x = static_cast<double>(ledger_.account(x).charged_bytes) * tenant_of(y).spec.share;
    const double use_y = static_cast<double>(ledger_.account(y).charged_bytes) * tenant_of(x).spec.share;
    return use_x != use_y ? use_x < use_y : a->wish_order < b->wish_order;
  });
  return out;
}

// A wish that cannot be met whole does not keep smaller ones behind it waiting: its deadline bounds its wait.
void StoreState::serve_wishes(TickReport&) {
  for (Session* s : wishers()) {
    if (may_have_pages(*s) && fill(*s, s->wish)) s->wish = 0;
  }
}

// Slabs for the wishes that are left, and why not if none can be had.
void StoreState::make_slabs(TickReport& report) {
  for (auto& t : tenants_) {
    t->obstacle = Obstacle::none;
    t->wish_bytes = 0;
    t->missing_ids = 0;
  }
  std::map<std::pair<TenantId, std::uint16_t>, std::uint64_t> missing;  // pages beyond free slots, by class
  for (Session* s : wishers()) {
    if (!may_have_pages(*s)) continue;
    Tenant& t = tenant_of(s->request.tenant);
    const std::uint32_t have = s->segment.magazine_count();
    if (s->segment.broken() || have >= s->wish) continue;
    const std::uint32_t pages = s->wish - have;
    t.wish_bytes += pages * layouts_->layout(s->model, Format::dense).page_bytes;
    t.obstacle = std::max(t.obstacle, Obstacle::waiting);
    if (t.pages->free_pages() < pages) {
      t.missing_ids = std::max(t.missing_ids, pages - t.pages->free_pages());
      t.obstacle = Obstacle::page_ids;
      continue;
    }
    const LayoutId layout = Layouts::id(s->model, Format::dense);
    std::uint64_t& sum = missing[{t.id, s->model}];
    sum += pages;
    std::uint64_t have_slots = pool_.ready_free_slots(t.id, layout) + pool_.creating_slots(t.id, layout);
    Obstacle obstacle = Obstacle::waiting;
    while (have_slots < sum && create_slab(t, s->model, Format::dense, false, &obstacle)) {
      ++report.slabs_created;
      have_slots = pool_.ready_free_slots(t.id, layout) + pool_.creating_slots(t.id, layout);
    }
    if (have_slots < sum) t.obstacle = std::max(t.obstacle, obstacle);
    if (fill(*s, s->wish)) {  // a slab that nobody has to map first is ready at once
      s->wish = 0;
      sum -= pages;
    }
  }
}

// Keeps magazines at their target while memory is plentiful; under pressure only wishes are served.
void StoreState::fill_targets(TickReport& report) {
  for (auto& [id, s] : sessions_) {
    Tenant& t = tenant_of(s->request.tenant);
    const std::uint32_t target = s->request.credits;
    if (level_of(t) >= PressureLevel::evict || t.obstacle != Obstacle::none || draining_) continue;
    if (target == 0 || !may_have_pages(*s)) continue;
    const std::uint32_t have = s->segment.magazine_count();
    if (have >= target || s->credits >= kMagazineSlots || s->segment.broken()) continue;
    std::uint32_t missing = target - have;
    const LayoutId layout = Layouts::id(s->model, Format::dense);
    Obstacle obstacle = Obstacle::none;
    while (level_of(t) == PressureLevel::calm && t.pages->free_pages() >= missing &&
           pool_.ready_free_slots(t.id, layout) + pool_.creating_slots(t.id, layout) < missing &&
           create_slab(t, s->model, Format::dense, false, &obstacle)) {
      ++report.slabs_created;
      measure_pressure();
    }
    while (missing > 0 && give_credit(*s)) {
      --missing;
      s->changed = true;
    }
  }
}

void StoreState::update_words(Session& s) {
  const Tenant& t = tenant_of(s.request.tenant);
  DaemonWords& words = s.segment.words();
  const auto set = [&](std::atomic<std::uint32_t>& word, std::uint32_t value) {
    if (word.load(std::memory_order_relaxed) == value) return;
    word.store(value, std::memory_order_release);
    s.changed = true;
  };
  const bool short_of_pages = level_of(t) >= PressureLevel::evict && s.wish == 0;
  set(words.pressure_level, static_cast<std::uint32_t>(level_of(t)));
  set(words.credits_wanted_back, short_of_pages ? s.segment.magazine_count() : 0);
  set(words.credits_target, s.request.credits);
  set(words.draining, draining_ ? 1 : 0);
}

bool StoreState::is_busy() const {
  if (pool_.over_slabs() > 0) return true;  // also without a session that keeps the ticks going
  if (!jobs_.empty() || verify_.running || device_.in_flight() > 0) return true;
  if (device_.published() != device_.publications()) return true;
  for (const auto& t : tenants_) {
    if (t->limbo.size() > 0 || !t->retiring.empty() || (device_.has_mirrors() && !t->mirror_kept) ||
        !t->seals.empty() || !t->asked.empty() || !t->unwanted.empty() || !t->emptying.empty() ||
        !t->unchecked.empty() || t->obstacle != Obstacle::none)
      return true;
  }
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& slab = pool_.slab(SlabId{i});
    if (slab.state == SlabState::creating || slab.state == SlabState::draining) return true;
    if (slab.state == SlabState::ready && slab.empty()) return true;  // until it has been kept for long enough
  }
  return std::any_of(sessions_.begin(), sessions_.end(), [](const auto& e) { return e.second->wish > 0; });
}

}  // namespace kvq

// Pages: given as credits, retired with their slots, and reaped when no step can see them any more.
//
// Invariant: a page's directory entry stays as it was from retirement until reap, so a running step never meets a freed
// entry; only then does the id become free, under a new generation.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

void StoreState::publish(Tenant& t, PageId page, const Entry& entry) {
  t.directory.publish(page, entry);
  device_.publish(t.id, page, pack_entry(entry));
}

// A slot whose page has moved. Its tag must be an epoch in which no step that begins can find it any more.
void StoreState::retire_unpublished(Tenant& t, SlotRef slot) { t.retiring.push_back({slot, device_.publications()}); }

// What the mirrors show by now: moved pages' slots go to limbo, credits to their sessions.
void StoreState::settle_published() {
  const std::uint64_t published = device_.published();
  for (auto& t : tenants_) {
    for (; !t->retiring.empty() && t->retiring.front().publication <= published; t->retiring.pop_front()) {
      t->limbo.retire(
          {.slot = t->retiring.front().slot, .page = kNullPage, .tag = t->directory.epoch(), .retired_ms = now_ms_});
      t->retired_in_epoch = true;
    }
    if (!device_.has_mirrors() || t->mirror_kept || device_.mirror_descriptor(t->id) < 0) continue;
    keep(kept_name("mirror", raw(t->id)), device_.mirror_descriptor(t->id));
    t->mirror_kept = true;
    for (const SessionId id : t->sessions) settle_readiness(*find_session(id));
  }
  for (auto& [id, s] : sessions_) {
    if (s->hidden_credits && show_credits(*s)) s->changed = true;
  }
}

// A client may use a page as soon as it sees it, so kernels must see its entry before.
bool StoreState::show_credits(Session& s) {
  if (s.hidden_credits && device_.published() < *s.hidden_credits) return false;
  s.segment.show_magazine();
  s.hidden_credits.reset();
  return true;
}

// One page into the magazine, from a slot that is free now.
bool StoreState::give_credit(Session& s) {
  Tenant& t = tenant_of(s.request.tenant);
  if (t.pages->free_pages() == 0 || s.credits >= kMagazineSlots || s.segment.magazine_count() >= kMagazineSlots) {
    return false;
  }
  if (s.segment.broken()) return false;
  const PageId page = t.pages->next_free();
  const std::optional<SlotRef> slot = pool_.take(t.id, Layouts::id(s.model, Format::dense), page);
  if (!slot) return false;
  t.pages->allocate({slot->slab, slot->slot, Format::dense}, s.model, s.id, now_ms_);
  const std::uint16_t generation = t.pages->record(page).generation;
  publish(t, page, {generation, Format::dense, EntryState::open, pool_.offset_bytes(*slot)});
  ++s.credits;
  save(s, s.record->counts);
  const bool pushed = s.segment.push({page, generation, 0});
  commit();
  kill_point(KillPoint::credit_committed);
  s.hidden_credits = device_.publications();
  show_credits(s);
  return pushed;
}

// All of it or nothing: pages that wait in a magazine for the rest of a wish would only be kept from others.
bool StoreState::fill(Session& s, std::uint32_t pages) {
  const std::uint32_t have = s.segment.magazine_count();
  if (s.segment.broken()) return false;
  if (have >= pages) return show_credits(s);
  const Tenant& t = tenant_of(s.request.tenant);
  const std::uint32_t missing = pages - have;
  if (s.credits + missing > kMagazineSlots || t.pages->free_pages() < missing ||
      pool_.ready_free_slots(t.id, Layouts::id(s.model, Format::dense)) < missing) {
    return false;
  }
  for (std::uint32_t i = 0; i < missing; ++i) {
    if (!give_credit(s)) return false;  // the client broke its ring meanwhile
  }
  s.changed = true;
  return show_credits(s);
}

Result<void> StoreState::request_credits(SessionId id, std::uint32_t pages) {
  Session* s = find_session(id);
  if (s == nullptr) return Error{Errc::stale_id, 0, "no such session"};
  if (!s->ready) return Error{Errc::invalid_argument, 0, "the session has not mapped all slabs yet: await ready first"};
  if (!s->connected || s->segment.broken()) return Error{Errc::invalid_argument, 0, "the session's rings are broken"};
  if (pages > kMagazineSlots) return Error{Errc::limit_reached, 0, "a magazine holds at most 4096 pages"};
  const Tenant& t = tenant_of(s->request.tenant);
  if (pages >= t.pages->capacity()) return Error{Errc::limit_reached, 0, "more pages than the directory names"};
  const std::uint64_t slots = pool_.slab_bytes() / layouts_->layout(s->model, Format::dense).page_bytes;
  const std::uint64_t slabs = (pages + slots - 1) / slots;
  const std::uint64_t quota = ledger_.account(t.id).quota_bytes;
  if (quota != 0 && slabs * pool_.slab_bytes() > quota) {
    return Error{Errc::over_quota, 0, "more pages than the tenant's quota holds"};
  }
  if (slabs > pool_.usable_slabs()) return Error{Errc::limit_reached, 0, "more pages than the arena holds"};
  if (!may_have_pages(*s)) {
    if (s->wish == 0) s->wish_order = ++last_wish_;
    s->wish = std::max(s->wish, pages);
    return Error{Errc::no_memory, 0, "a step of this session has been open for too long: its memory cannot be reused"};
  }
  if (fill(*s, pages)) {
    s->wish = 0;
    return {};
  }
  if (s->wish == 0) s->wish_order = ++last_wish_;
  s->wish = std::max(s->wish, pages);
  return Error{Errc::no_memory, 0, "no room yet for the pages asked for"};
}

void StoreState::withdraw_credits(SessionId id) {
  Session* s = find_session(id);
  if (s == nullptr || s->wish == 0) return;
  s->wish = 0;
  ++counts_.refusals;
  ++tenant_of(s->request.tenant).counts.refusals;
}

bool StoreState::return_credit(Session& s, const Command& c) {
  Tenant& t = tenant_of(s.request.tenant);
  if (!t.pages->names_page(c.page)) return false;
  const PageRecord& r = t.pages->record(c.page);
  if (r.state != PageState::credit || r.owner != s.id || r.generation != c.generation) return false;
  --s.credits;
  retire_page(t, c.page);
  return true;
}

void StoreState::retire_page(Tenant& t, PageId page) {
  const PageRecord& r = t.pages->record(page);
  const SlotRef slot{r.slab, r.slot};
  t.pages->move(page, PageState::retired);
  pool_.retire(slot);
  t.limbo.retire({.slot = slot, .page = page, .tag = t.directory.epoch(), .retired_ms = now_ms_});
  t.retired_in_epoch = true;
  kill_point(KillPoint::page_retired);
}

// The last sequence let go of it.
void StoreState::released(Tenant& t, PageId page) {
  const PageRecord& r = t.pages->record(page);
  if ((r.flags & kPageIndexed) != 0) return;      // stays, as cached
  if (r.state == PageState::transcoding) return;  // a job reads it: finish_job retires it
  retire_page(t, page);
}

Epoch StoreState::oldest_open(const Tenant& t) const {
  const Epoch current = t.directory.epoch();
  Epoch oldest{raw(current) + 1};
  for (SessionId id : t.sessions) oldest = std::min(oldest, find_session(id)->segment.oldest_open(current));
  return oldest;
}

void StoreState::reap(Tenant& t, std::uint64_t now_ms) {
  if (t.retired_in_epoch) {
    t.directory.advance_epoch();  // publish, fence, and only then the scan below
    t.retired_in_epoch = false;
    kill_point(KillPoint::epoch_advanced);
  }
  if (t.limbo.size() == 0) return;
  t.limbo.reap(oldest_open(t), [&](const Retired& item) {
    pool_.reap(item.slot, now_ms);
    counts_.grace_period.add(now_ms - std::min(now_ms, item.retired_ms));
    if (item.page == kNullPage) return;
    t.pages->release_id(item.page);
    kill_point(KillPoint::slot_reaped);
    commit();
    publish(t, item.page, {t.pages->record(item.page).generation, Format::none, EntryState::free, 0});
  });
}

}  // namespace kvq

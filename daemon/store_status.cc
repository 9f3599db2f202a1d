// Snapshots for operators, and the sums that must hold in every state.
#include <algorithm>
#include <unordered_map>

#include "daemon/store_state.h"

namespace kvq {

StoreStatus StoreState::status() const {
  StoreStatus out;
  out.slab_bytes = pool_.slab_bytes();
  out.slabs = std::max(pool_.limit(), pool_.used_slabs());
  out.arena_bytes = out.slabs * out.slab_bytes;
  out.target_bytes = pool_.limit() * out.slab_bytes;
  out.start_bytes = tables_.root_record().asked_bytes;
  out.most_bytes = device_.can_resize() ? device_.most_bytes() : out.target_bytes;
  out.slabs_free = pool_.free_slabs();
  out.slabs_over = pool_.over_slabs();
  out.slabs_reserved = pool_.reserve();
  out.level = arena_level_;
  out.watermarks = config_.watermarks;
  out.counts = counts_;
  out.transcodes_in_flight = static_cast<std::uint32_t>(jobs_.size() - checks_in_flight_);
  out.draining = draining_;
  out.instance = tables_.root_record().instance;
  out.verify = verify_;
  out.adopt = adopt_;
  out.device = device_.health();
  for (const auto& t : tenants_) {
    out.limbo_slots += t->limbo.size();
    TenantStatus s;
    s.id = t->id;
    s.name = t->spec.name;
    s.quota_bytes = ledger_.account(t->id).quota_bytes;
    s.slab_bytes = ledger_.account(t->id).charged_bytes;
    s.share = t->spec.share;
    s.open_pages =
        t->pages->count(PageState::credit) + t->pages->count(PageState::open) + t->pages->count(PageState::sealing);
    s.sealed_pages = t->pages->count(PageState::sealed) + t->pages->count(PageState::transcoding);
    s.cached_pages = t->pages->cached_pages();
    s.sessions = static_cast<std::uint32_t>(t->sessions.size());
    s.level = level_of(*t);
    s.configured = t->configured;
    s.counts = t->counts;
    out.tenants.push_back(std::move(s));
  }
  for (const auto& [id, s] : sessions_) {
    if (s->segment.open_steps() > 0) out.oldest_step_ms = std::max(out.oldest_step_ms, open_ms(*s));
  }
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& slab = pool_.slab(SlabId{i});
    if (slab.state == SlabState::free) continue;
    TenantStatus& s = out.tenants[raw(slab.tenant) - 1];
    FormatUse& use = s.format[static_cast<std::size_t>(Layouts::format_of(slab.layout))];
    use.pages += slab.live;
    use.bytes += slab.live * slab.page_bytes;
    s.page_bytes += slab.live * slab.page_bytes;
    s.limbo_bytes += slab.limbo * slab.page_bytes;
    s.free_bytes += pool_.slab_bytes() - (std::uint64_t{slab.live} + slab.limbo) * slab.page_bytes;
  }
  return out;
}

std::vector<SessionStatus> StoreState::sessions() const {
  std::vector<SessionStatus> out;
  for (const auto& [id, s] : sessions_) {
    SessionStatus x;
    x.id = id;
    x.tenant = s->request.tenant;
    x.pid = s->request.pid;
    x.label = s->request.label;
    x.connected = s->connected;
    x.ready = s->ready;
    x.sequences = static_cast<std::uint32_t>(s->sequences.size());
    for (const auto& [number, sequence] : s->sequences) {
      const SequenceRecord& r = sequences_->record(sequence);
      x.running += (r.flags & kSequenceRunning) != 0 ? 1 : 0;
      x.pages += r.pages - r.first_kept;
    }
    x.credits = s->credits;
    x.credits_target = s->request.credits;
    const Epoch current = tenant_of(s->request.tenant).directory.epoch();
    x.open_steps = s->segment.open_steps();
    if (x.open_steps > 0)
      x.oldest_step_epochs = raw(current) + 1 - std::min(raw(current) + 1, raw(s->segment.oldest_open(current)));
    if (x.open_steps > 0) {
      x.oldest_step_ms = open_ms(*s);
      for (const Retired& item : tenant_of(s->request.tenant).limbo.items()) {
        if (item.tag >= s->oldest_step) x.limbo_bytes += pool_.slab(item.slot.slab).page_bytes;
      }
    }
    x.commands_refused = s->record->refused;
    x.waits_for_client = s->waits;
    x.evicted = (s->record->flags & kSessionEvicted) != 0;
    x.lost_pages = s->record->lost_pages;
    out.push_back(std::move(x));
  }
  return out;
}

std::vector<PageStatus> StoreState::pages(TenantId id, std::uint32_t limit, std::uint64_t now_ms) const {
  std::vector<PageStatus> out;
  if (raw(id) == 0 || raw(id) > tenants_.size()) return out;
  const Tenant& t = tenant_of(id);
  for (std::uint32_t i = 1; i < t.pages->capacity() && out.size() < limit; ++i) {
    const PageRecord& r = t.pages->record(PageId{i});
    if (r.state == PageState::free) continue;
    const PageUse& u = t.pages->use(PageId{i});
    PageStatus p;
    p.tenant = id;
    p.page = PageId{i};
    p.generation = r.generation;
    p.format = r.format;
    p.state = name(r.state);
    p.slab = r.slab;
    p.slot = raw(r.slot);
    p.references = u.references;
    p.idle_ms = u.running > 0 || now_ms < r.last_use_ms ? 0 : now_ms - r.last_use_ms;
    p.indexed = (r.flags & kPageIndexed) != 0;
    if ((r.flags & kPageKeepsDense) != 0) {
      p.stays_dense = "values out of range or transcodes failed";
    } else if (t.spec.floor_dense) {
      p.stays_dense = "the tenant keeps dense";
    } else if (u.immobile > 0) {
      p.stays_dense = "a holder lost its connection";
    } else if (u.protections > 0) {
      p.stays_dense = "window, sink or format floor";
    }
    out.push_back(std::move(p));
  }
  return out;
}

void StoreState::check_invariants() const {
  KVQ_ASSERT(journal_.empty());
  pool_.check_invariants();
  std::map<TenantId, std::uint64_t> charged;
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& slab = pool_.slab(SlabId{i});
    KVQ_ASSERT((slab.state == SlabState::free) == (slab_use_[i].charge.bytes() == 0));
    if (slab.state != SlabState::free) charged[slab.tenant] += pool_.slab_bytes();
  }
  for (const auto& t : tenants_) {
    const PageTable& pages = *t->pages;
    KVQ_ASSERT(ledger_.account(t->id).charged_bytes == charged[t->id]);
    std::vector<PageUse> expected(pages.capacity());
    std::map<SessionId, std::uint32_t> credits;
    for (SessionId id : t->sessions) {
      for (const auto& [number, sequence] : find_session(id)->sequences) {
        const SequenceRecord& r = sequences_->record(sequence);
        for (std::uint32_t i = r.first_kept; i < r.pages; ++i) {
          PageUse& u = expected[raw(sequences_->page(sequence, i))];
          const Hold hold = hold_of(r, i, r.pages, window());
          u.references += hold.reference;
          u.running += hold.running;
          u.protections += hold.protect;
          u.immobile += hold.immobile;
        }
      }
    }
    std::uint32_t retired = 0, indexed = 0;
    FormatCounts by_format{};
    std::uint64_t leaving_bytes = 0;
    for (std::uint32_t i = 1; i < pages.capacity(); ++i) {
      const PageRecord& r = pages.record(PageId{i});
      const PageUse& u = pages.use(PageId{i});
      const PageUse& e = expected[i];
      KVQ_ASSERT(u.references == e.references && u.running == e.running);
      KVQ_ASSERT(u.protections == e.protections && u.immobile == e.immobile);
      if ((r.flags & kPageIndexed) != 0) {
        ++indexed;
        ++by_format[static_cast<std::size_t>(r.format)];
        if (r.parent != kNullPage) ++expected[raw(r.parent)].children;
      }
      const Entry entry = t->directory.entry(PageId{i});
      if (r.state == PageState::free) {
        KVQ_ASSERT(entry.state == EntryState::free && u.references == 0);
        continue;
      }
      KVQ_ASSERT(entry.generation == r.generation && entry.offset_bytes == pool_.offset_bytes({r.slab, r.slot}));
      KVQ_ASSERT(entry.format == r.format && pool_.slab(r.slab).tenant == t->id);
      KVQ_ASSERT(Layouts::format_of(pool_.slab(r.slab).layout) == r.format);
      if (r.state == PageState::credit) ++credits[r.owner];
      retired += r.state == PageState::retired ? 1 : 0;
      leaving_bytes += r.state == PageState::transcoding ? pool_.slab(r.slab).page_bytes : 0;
      KVQ_ASSERT((entry.state == EntryState::lost) == (r.state == PageState::lost) || r.state == PageState::retired);
      KVQ_ASSERT((r.state == PageState::retired) == (pool_.slab(r.slab).page[raw(r.slot)] == kNullPage));
      KVQ_ASSERT(r.state == PageState::retired || pool_.slab(r.slab).page[raw(r.slot)] == PageId{i});
    }
    for (std::uint32_t i = 1; i < pages.capacity(); ++i) {
      KVQ_ASSERT(expected[i].children == pages.use(PageId{i}).children);
    }
    std::uint32_t limbo_pages = 0;
    for (const Retired& item : t->limbo.items()) limbo_pages += item.page != kNullPage ? 1 : 0;
    KVQ_ASSERT(by_format == pages.indexed());
    KVQ_ASSERT(retired == limbo_pages && indexed == t->prefix->size() && leaving_bytes == t->leaving_bytes);
    for (SessionId id : t->sessions) KVQ_ASSERT(find_session(id)->credits == credits[id]);
  }
}

}  // namespace kvq

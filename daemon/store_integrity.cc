// Integrity: a checksum for every sealed page, compared when somebody asks and before a transcode reads it.
//
// Invariant: a page whose bytes are not what its checksum says is read by nobody from then on: its entry says lost, it
// and everything that was cached behind it lose their names, and the sessions whose sequences hold it are told. Its
// slot waits for them like any other.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

// Reads the page once, on a worker: sums it up, or compares it with the sum it has. The page stays as it is and may
// move or go meanwhile, and its slot be written for another: then the answer is about bytes that are not its own any
// more, and is left alone, even if the page has come back. Only its slab must stay mapped.
void StoreState::start_check(Tenant& t, PageId page, bool verifies) {
  const PageRecord& r = t.pages->record(page);
  const SlotRef at{r.slab, r.slot};
  unsubmitted_.push_back({.id = ++last_job_,
                          .geometry = &layouts_->geometry(r.model),
                          .from = &layouts_->layout(r.model, r.format),
                          .source_bytes = pool_.offset_bytes(at),
                          .checksum = checksum_of(r)});
  jobs_.emplace(last_job_, Job{.tenant = t.id,
                               .page = page,
                               .generation = r.generation,
                               .moved_before = t.pages->use(page).moves,
                               .from = at,
                               .checks = true,
                               .verifies = verifies});
  ++slab_use_[raw(at.slab)].checks;
  ++checks_in_flight_;
}

// Few at a time: transcodes, which make room, wait behind them.
void StoreState::start_checks() {
  const std::size_t most = device_.checks_at_once();
  std::size_t room = most - std::min(most, checks_in_flight_);
  const auto due = [&](Tenant& t, std::deque<std::pair<PageId, std::uint16_t>>& queue) -> std::optional<PageId> {
    while (!queue.empty() && room > 0) {
      const auto [page, generation] = queue.front();
      queue.pop_front();
      const PageRecord& r = t.pages->record(page);
      if (r.generation == generation && r.state == PageState::sealed) {
        --room;
        return page;
      }
      if (&queue == &t.verify) ++verify_.pages_done;  // it has gone, or a transcode compares it
    }
    return std::nullopt;
  };
  for (auto& t : tenants_) {
    while (const auto page = due(*t, t->unchecked)) {
      if ((t->pages->record(*page).flags & kPageHasChecksum) == 0) start_check(*t, *page, false);
    }
  }
  if (!verify_.running) return;
  bool left = false;
  for (auto& t : tenants_) {
    while (const auto page = due(*t, t->verify)) start_check(*t, *page, true);
    left |= !t->verify.empty();
  }
  for (const auto& [id, job] : jobs_) left |= job.verifies;
  if (left) return;
  verify_.running = false;
  ++verify_.passes;
  log("event=verify_done pages=" + std::to_string(verify_.pages_done) + " bad=" + std::to_string(verify_.pages_bad));
}

void StoreState::finish_check(const Job& job, const TranscodeDone& done) {
  Tenant& t = tenant_of(job.tenant);
  const PageRecord& r = t.pages->record(job.page);
  --slab_use_[raw(job.from.slab)].checks;
  --checks_in_flight_;
  if (job.verifies) ++verify_.pages_done;
  const bool same = r.generation == job.generation && t.pages->use(job.page).moves == job.moved_before;
  if (!same || r.state != PageState::sealed) return;  // a transcode that reads it compares it itself
  if (done.error.code == Errc::lost_page) {
    if (job.verifies) ++verify_.pages_bad;
    return quarantine(t, job.page);
  }
  if (done.error.code == Errc::ok) t.pages->set_checksum(job.page, done.checksum);
}

void StoreState::quarantine(Tenant& t, PageId page) {
  const PageRecord& r = t.pages->record(page);
  ++verify_.pages_bad_ever;
  log("event=page_lost tenant=" + t.spec.name + " page=" + std::to_string(raw(page)) + " slab=" +
      std::to_string(raw(r.slab)) + " slot=" + std::to_string(raw(r.slot)) + " why=\"bytes do not fit the checksum\"");
  if ((r.flags & kPageIndexed) != 0) unname(t, page);
  t.pages->move(page, PageState::lost);
  commit();
  publish(t, page, {r.generation, r.format, EntryState::lost, pool_.offset_bytes({r.slab, r.slot})});
  kill_point(KillPoint::page_quarantined);
  if (t.pages->use(page).references == 0) {
    retire_page(t, page);
    commit();
  } else {
    tell_lost(t, page);
  }
}

// Takes the names of a page and of all that are cached behind it, the last first.
void StoreState::unname(Tenant& t, PageId page) {
  std::vector<PageId> chain{page};
  for (std::size_t i = 0; i < chain.size(); ++i) {
    if (t.pages->use(chain[i]).children == 0) continue;
    for (std::uint32_t p = 1; p < t.pages->capacity(); ++p) {
      const PageRecord& r = t.pages->record(PageId{p});
      if ((r.flags & kPageIndexed) != 0 && r.parent == chain[i]) chain.push_back(PageId{p});
    }
  }
  for (auto p = chain.rbegin(); p != chain.rend(); ++p) {
    t.prefix->erase(*p);
    const PageRecord& r = t.pages->record(*p);
    // What a job reads is retired when the job is over.
    if (*p != page && t.pages->use(*p).references == 0 && r.state == PageState::sealed) retire_page(t, *p);
    commit();
  }
}

void StoreState::tell_lost(Tenant& t, PageId page) {
  for (SessionId id : t.sessions) {
    Session& s = *find_session(id);
    const std::size_t before = s.lost.size();
    for (const auto& [number, sequence] : s.sequences) {
      const SequenceRecord& q = sequences_->record(sequence);
      for (std::uint32_t i = q.first_kept; i < q.pages; ++i) {
        if (sequences_->page(sequence, i) == page) s.lost.push_back({page, SequenceId{number}});
      }
    }
    if (s.lost.size() == before) continue;
    save(s, s.record->lost_pages);
    s.record->lost_pages += s.lost.size() - before;
    commit();
    s.segment.words().lost_pages.store(s.record->lost_pages, std::memory_order_release);
    s.changed = true;
  }
}

std::vector<LostPage> StoreState::lost_pages(SessionId id, std::uint64_t since, std::uint64_t& now) const {
  const Session* s = find_session(id);
  now = s == nullptr ? 0 : s->record->lost_pages;
  if (s == nullptr || since >= now) return {};
  const std::uint64_t wanted = std::min<std::uint64_t>(now - since, s->lost.size());
  return {s->lost.end() - static_cast<std::ptrdiff_t>(wanted), s->lost.end()};
}

void StoreState::verify(std::optional<TenantId> id) {
  if (!verify_.running) verify_.pages_total = verify_.pages_done = verify_.pages_bad = 0;
  for (auto& t : tenants_) {
    if (!id || t->id == *id) verify_tenant(*t);
  }
  verify_.running = true;
  log("event=verify_start pages=" + std::to_string(verify_.pages_total));
}

void StoreState::verify_tenant(Tenant& t) {
  for (std::uint32_t i = 1; i < t.pages->capacity(); ++i) {
    const PageRecord& r = t.pages->record(PageId{i});
    if (r.state != PageState::sealed && r.state != PageState::transcoding) continue;
    t.verify.emplace_back(PageId{i}, r.generation);
    ++verify_.pages_total;
  }
}

}  // namespace kvq

// Taking over what an earlier daemon left: undo what it had not committed, check everything, rebuild the indexes, and
// write anew what clients see.
//
// Invariant: until every check has passed nothing is changed but the journal's undoing, so that a state that is refused
// can still be looked at. Whatever may have been in flight is resolved by one rule: the records say what holds. A slot
// that no record names may still be read by an open step, so it goes to limbo; the first tick advances the epoch and
// scans, as after any retirement.
#include <algorithm>
#include <cstring>

#include "daemon/store_check.h"
#include "daemon/store_state.h"

namespace kvq {
namespace {

struct Left {
  StoreTables tables;
  std::vector<TenantFiles> tenants;
  std::uint64_t undone_bytes = 0;
  std::string resized;  // line of the log, if the configuration asks for another size
};

Error refused(std::string& why, std::string reason) {
  if (why.empty()) why = std::move(reason);
  return {Errc::invalid_argument, 0, "the state of an earlier daemon cannot be trusted"};
}

bool undo(Left& left) {
  Journal journal(left.tables.journal.records());
  left.undone_bytes = journal.used_bytes();
  return journal.undo([&](std::uint32_t region) -> std::span<std::byte> {
    const std::uint32_t tenant = region & 0xff'ffff;
    switch (static_cast<TableKind>(region >> 24)) {
      case TableKind::pages:
        return tenant >= 1 && tenant <= left.tenants.size() ? left.tenants[tenant - 1].pages.bytes()
                                                            : std::span<std::byte>{};
      case TableKind::sequences:
        return left.tables.sequences.bytes();
      case TableKind::chunks:
        return left.tables.chunks.bytes();
      case TableKind::sessions:
        return left.tables.sessions.bytes();
      default:
        return {};
    }
  });
}

Result<Left> open_left(const StoreConfig& config, Device& device, Kept& kept, std::string& why) {
  Result<StoreTables> tables = adopt_tables(config, device, kept, why);
  if (!tables) return tables.error();
  Left left{std::move(*tables), {}};
  for (std::uint32_t i = 0; i < kMaxTenants && left.tables.tenants.records()[i].live != 0; ++i) {
    Result<TenantFiles> files = adopt_tenant_files(config, device, TenantId{i + 1}, kept, why);
    if (!files) return files.error();
    left.tenants.push_back(std::move(*files));
  }
  if (!undo(left)) return refused(why, "the journal is damaged");
  kill_point(KillPoint::adopt_undone);
  if (std::string wrong = check_records(left.tables, left.tenants, device.slab_bytes()); !wrong.empty()) {
    return refused(why, std::move(wrong));
  }
  for (std::uint32_t i = 0; i < device.places(); ++i) {
    const SlabRecord& record = left.tables.slabs.records()[i];
    if (record.live == 0) continue;
    const std::string name = kept_name("slab", i);
    if (const Result<void> placed = device.adopt_slab(SlabId{i}, kept[name], record.serial); !placed) {
      return refused(why, name + ": " + placed.error().context);
    }
  }
  kill_point(KillPoint::adopt_checked);
  left.resized = size_arena(left.tables.root_record(), config, device);
  return left;
}

}  // namespace

Result<std::unique_ptr<Store>> Store::adopt(const StoreConfig& config, Device& device, DeliverNotice deliver,
                                            LogDecision log, Keeper& keeper, Kept& kept, std::string& why_not,
                                            std::uint64_t now_ms) {
  if (!kept.contains(kept_name("root"))) return Error{Errc::stale_id, 0, "no earlier daemon left anything"};
  Result<Left> left = open_left(config, device, kept, why_not);
  if (!left) return left.error();
  auto state = std::make_unique<StoreState>(config, device, std::move(deliver), std::move(log), &keeper,
                                            std::move(left->tables));
  const Result<void> taken = state->take_over(std::move(left->tenants), kept, why_not, now_ms);
  if (!taken) return taken.error();
  state->note_undone(left->undone_bytes);
  state->note_resized(left->resized);
  return std::unique_ptr<Store>(std::move(state));
}

Result<void> StoreState::take_over(std::vector<TenantFiles> tenants, Kept& kept, std::string& why,
                                   std::uint64_t now_ms) {
  now_ms_ = now_ms;
  adopt_.adopted = true;
  for (std::size_t i = 0; i < tenants.size(); ++i) {
    take_tenant(tables_.tenants.records()[i], std::move(tenants[i]), kept);
  }
  if (const Result<void> taken = take_sessions(kept, why); !taken) return taken;
  take_slabs();
  take_sequences();
  for (auto& t : tenants_) publish_all(*t);
  for (auto& t : tenants_) settle_pages(*t);
  settle_published();
  kill_point(KillPoint::adopt_published);
  end_unready();
  forget_unknown(kept);
  verify(std::nullopt);
  measure_pressure();
  return {};
}

void StoreState::take_tenant(const TenantRecord& record, TenantFiles files, Kept& kept) {
  auto t = std::make_unique<Tenant>();
  t->id = TenantId{static_cast<std::uint32_t>(tenants_.size() + 1)};
  t->spec.name = record.name;
  t->spec.quota_bytes = record.quota_bytes;
  t->spec.share = record.share;
  t->spec.floor_dense = record.floor_dense != 0;
  std::copy(std::begin(record.salt), std::end(record.salt), t->spec.salt.begin());
  const auto mirror = kept.find(kept_name("mirror", raw(t->id)));
  add_files(*t, std::move(files), mirror == kept.end() ? Descriptor{} : std::move(mirror->second));
  ledger_.open_account(t->spec.quota_bytes);
  tenants_.push_back(std::move(t));
}

// Before anything else of a session: what its client wrote and what its steps still read is in its segment.
Result<void> StoreState::take_sessions(Kept& kept, std::string& why) {
  for (SessionRecord& r : tables_.sessions.records()) {
    if (raw(r.id) == 0) continue;
    auto s = std::make_unique<Session>();
    const std::string name = kept_name("segment", raw(r.id));
    Result<SessionSegment> segment = SessionSegment::adopt(
        kept[name], {.session = r.id, .tenant = r.tenant, .owner_pid = r.pid, .token = r.token}, r.counts);
    if (!segment) return refused(why, name + ": " + segment.error().context);
    s->segment = std::move(*segment);
    s->id = r.id;
    s->record = &r;
    s->model = r.model;
    s->request = {.tenant = r.tenant,
                  .pid = r.pid,
                  .uid = r.uid,
                  .label = r.label,
                  .geometry = layouts_->geometry(r.model),
                  .floor_dense = (r.flags & kSessionFloorDense) != 0,
                  .maps_slabs = (r.flags & kSessionMapsSlabs) != 0,
                  .credits = r.credits_target};
    std::copy(std::begin(r.fingerprint), std::end(r.fingerprint), s->request.fingerprint.begin());
    count_layers(s->request.geometry);
    s->ready = (r.flags & kSessionReady) != 0;
    if (s->ready && s->request.maps_slabs && device_.has_mirrors() && !tenant_of(r.tenant).mirror_kept) {
      return refused(why, kept_name("mirror", raw(r.tenant)) + " is missing");
    }
    s->connected = s->waits = (r.flags & kSessionClosed) == 0;
    s->oldest_since_ms = now_ms_;
    s->segment.words().revoked.store(s->connected ? 0 : 1, std::memory_order_relaxed);
    tenant_of(r.tenant).sessions.push_back(r.id);
    sessions_.emplace(r.id, std::move(s));
    ++adopt_.sessions;
  }
  return {};
}

// Every session of the tenant may have mapped every slab of it; one that was being made is ready once they say so.
void StoreState::take_slabs() {
  for (std::uint32_t i = 0; i < device_.places(); ++i) {
    const SlabRecord& r = slab_record(SlabId{i});
    if (r.live == 0) continue;
    pool_.adopt(SlabId{i}, r.tenant, r.layout,
                layouts_->layout(Layouts::model_of(r.layout), Layouts::format_of(r.layout)).page_bytes);
    Result<TenantLedger::Charge> charge = ledger_.charge(r.tenant, pool_.slab_bytes(), std::uint64_t{1} << 60);
    KVQ_ASSERT(charge);  // a quota that was lowered meanwhile makes the planner act, it does not drop what is there
    SlabUse& use = slab_use_[i];
    use.charge = std::move(*charge);
    for (SessionId id : tenant_of(r.tenant).sessions) {
      const Session& s = *find_session(id);
      if (!s.request.maps_slabs) continue;
      use.importers.push_back(id);
      if (s.ready && s.connected && r.ready == 0) use.awaited.push_back(id);
    }
    if (r.ready != 0) pool_.set_ready(SlabId{i}, now_ms_);
    make_ready_if_answered(SlabId{i});
    ++adopt_.slabs;
  }
  pool_.set_limit(pool_.limit());  // what transcodes may have counts what is there
  device_.resize(pool_.ceiling() * pool_.slab_bytes());
}

void StoreState::take_sequences() {
  std::vector<std::vector<PageUse>> uses(tenants_.size());
  for (std::size_t i = 0; i < tenants_.size(); ++i) uses[i].resize(tenants_[i]->page_file.records().size());
  sequences_->each_live([&](SequenceIndex index, const SequenceRecord& q) {
    Session& s = *find_session(q.session);
    s.sequences.emplace(raw(q.id), index);
    ++adopt_.sequences;
    const auto records = tenant_of(q.tenant).page_file.records();
    for (std::uint32_t i = q.first_kept; i < q.pages; ++i) {
      const Hold hold = hold_of(q, i, q.pages, window());
      PageUse& u = uses[raw(q.tenant) - 1][raw(sequences_->page(index, i))];
      u.references += hold.reference;
      u.running += hold.running;
      u.protections += hold.protect;
      u.immobile += hold.immobile;
      if (records[raw(sequences_->page(index, i))].state == PageState::lost) {
        s.lost.push_back({sequences_->page(index, i), q.id});
      }
    }
  });
  for (auto& t : tenants_) take_pages(*t, uses[raw(t->id) - 1]);
  for (auto& [id, s] : sessions_) {
    s->record->lost_pages = std::max<std::uint64_t>(s->record->lost_pages, s->lost.size());
    s->segment.words().lost_pages.store(s->record->lost_pages, std::memory_order_relaxed);
  }
}

void StoreState::take_pages(Tenant& t, std::vector<PageUse>& uses) {
  const auto records = t.page_file.records();
  for (std::uint32_t i = 1; i < records.size(); ++i) {
    PageRecord& r = records[i];
    if (r.state == PageState::free) continue;
    // No job reads it any more, and what one wrote is named by nobody.
    if (r.state == PageState::transcoding) r.state = PageState::sealed;
    r.flags &= static_cast<std::uint16_t>(~kPageTurnsCold);
    r.last_use_ms = std::min(r.last_use_ms, now_ms_);
    if ((r.flags & kPageIndexed) != 0 && r.parent != kNullPage) ++uses[raw(r.parent)].children;
    KVQ_ASSERT(pool_.occupy({r.slab, r.slot}, PageId{i}));
    if (r.state == PageState::credit) ++find_session(r.owner)->credits;
    if (r.state == PageState::sealing) t.seals.push_back({PageId{i}, r.generation});
    if (r.state == PageState::sealed && (r.flags & kPageHasChecksum) == 0)
      t.unchecked.emplace_back(PageId{i}, r.generation);
    ++adopt_.pages;
  }
  std::sort(t.seals.begin(), t.seals.end(), [&](const PendingSeal& a, const PendingSeal& b) {
    const PageRecord &x = records[raw(a.page)], &y = records[raw(b.page)];
    return std::pair{x.seal_sequence, x.seal_index} < std::pair{y.seal_sequence, y.seal_index};
  });
  t.pages = std::make_unique<PageTable>(records, !t.spec.floor_dense,
                                        region(TableKind::pages, t.page_file.bytes(), t.id), std::move(uses));
  t.prefix = std::make_unique<PrefixIndex>(t.prefix_file.buckets(), *t.pages);
  t.prefix->adopt();
}

// Everything that nobody holds, and every slot that no record names, into limbo.
void StoreState::settle_pages(Tenant& t) {
  for (std::uint32_t i = 1; i < t.pages->capacity(); ++i) {
    const PageRecord& r = t.pages->record(PageId{i});
    if (r.state == PageState::retired) {
      pool_.retire({r.slab, r.slot});
      t.limbo.retire({.slot = {r.slab, r.slot}, .page = PageId{i}, .tag = t.directory.epoch(), .retired_ms = now_ms_});
      continue;
    }
    const bool bound = r.state != PageState::free && r.state != PageState::credit;
    if (!bound || t.pages->use(PageId{i}).references != 0 || (r.flags & kPageIndexed) != 0) continue;
    retire_page(t, PageId{i});
    commit();
  }
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    const Slab& slab = pool_.slab(SlabId{i});
    if (slab.state != SlabState::ready || slab.tenant != t.id) continue;
    pool_.take_all_free(SlabId{i}, [&](SlotRef slot) { retire_unpublished(t, slot); });
  }
  t.retired_in_epoch = true;
}

void StoreState::publish_all(Tenant& t) {
  for (std::uint32_t i = 1; i < t.pages->capacity(); ++i) {
    const PageRecord& r = t.pages->record(PageId{i});
    Entry entry{r.generation, r.format, EntryState::sealed, 0};
    switch (r.state) {
      case PageState::free:
        entry = {r.generation, Format::none, EntryState::free, 0};
        break;
      case PageState::retired:
        continue;  // as it was until it is reaped
      case PageState::credit:
      case PageState::open:
      case PageState::sealing:
        entry.state = EntryState::open;
        break;
      case PageState::lost:
        entry.state = EntryState::lost;
        break;
      default:
        break;
    }
    if (r.state != PageState::free) entry.offset_bytes = pool_.offset_bytes({r.slab, r.slot});
    if (!(t.directory.entry(PageId{i}) == entry)) publish(t, PageId{i}, entry);
  }
  for (SessionId id : t.sessions) {
    Session& s = *find_session(id);
    s.segment.words().commands_refused.store(s.record->refused, std::memory_order_relaxed);
    s.segment.show_commands();
    s.hidden_credits = device_.publications();
    s.changed = true;
  }
}

// A session that had not mapped its memory holds nothing, and its client starts over.
void StoreState::end_unready() {
  std::vector<SessionId> ids;
  for (const auto& [id, s] : sessions_) {
    if (!s->ready) ids.push_back(id);
  }
  for (SessionId id : ids) process_ended(id, now_ms_);
}

// Names without a record: their record was not written yet, or not any more. Those of live sessions are the caller's.
void StoreState::forget_unknown(Kept& kept) {
  for (auto it = kept.begin(); it != kept.end();) {
    const std::string& name = it->first;
    const bool used = it->second.get() < 0;  // taken above
    const auto number = static_cast<std::uint32_t>(std::strtoul(name.c_str() + name.rfind('-') + 1, nullptr, 10));
    const bool of_session =
        name.starts_with("kvq-pid-") || name.starts_with("kvq-doorbell-") || name.starts_with("kvq-notice-");
    if (of_session && find_session(SessionId{number}) != nullptr) {
      ++it;
      continue;
    }
    if (!used && name.starts_with("kvq-")) forget(name);
    it = kept.erase(it);
  }
}

}  // namespace kvq

// Each check sees one kind of record, in the order in which they refer to one another.
#include "daemon/store_check.h"

#include <cmath>
#include <cstring>
#include <map>
#include <set>

namespace kvq {
namespace {

class RecordCheck {
 public:
  RecordCheck(const StoreTables& tables, const std::vector<TenantFiles>& files, std::uint64_t slab_bytes)
      : tables_(tables), files_(files), slab_bytes_(slab_bytes), layouts_(tables.models.records()) {}

  // The models must have been checked before layouts are computed from them: see check_records.
  std::string run() {
    using Check = void (RecordCheck::*)();
    for (Check check : {&RecordCheck::tenants, &RecordCheck::slabs, &RecordCheck::sessions, &RecordCheck::sequences,
                        &RecordCheck::chunks, &RecordCheck::pages, &RecordCheck::block_tables}) {
      (this->*check)();
      if (!wrong_.empty()) return wrong_;
    }
    return wrong_;
  }

 private:
  bool expect(bool good, const char* what, std::uint64_t number, const char* why) {
    if (!good && wrong_.empty()) wrong_ = std::string(what) + " " + std::to_string(number) + ": " + why;
    return good;
  }

  bool live_tenant(TenantId id) const { return raw(id) >= 1 && raw(id) <= files_.size(); }
  const SessionRecord* session(SessionId id) const {
    const auto found = sessions_.find(id);
    return found == sessions_.end() ? nullptr : found->second;
  }

  void tenants() {
    std::set<std::string> names;
    for (std::size_t i = 0; i < kMaxTenants; ++i) {
      const TenantRecord& t = tables_.tenants.records()[i];
      if (i >= files_.size()) {
        expect(t.live == 0, "tenant", i + 1, "lives behind one that does not");
        continue;
      }
      expect(std::memchr(t.name, 0, sizeof(t.name)) != nullptr && t.name[0] != 0, "tenant", i + 1, "has no name");
      if (!wrong_.empty()) return;
      expect(names.insert(t.name).second, "tenant", i + 1, "has the name of another");
      expect(std::isfinite(t.share) && t.share > 0, "tenant", i + 1, "has no share");
    }
  }

  void slabs() {
    const auto records = tables_.slabs.records();
    slot_used_.resize(records.size());
    for (std::size_t i = 0; i < records.size(); ++i) {
      const SlabRecord& s = records[i];
      if (s.live == 0) continue;
      const std::uint16_t model = Layouts::model_of(s.layout);
      const auto format = static_cast<std::uint32_t>(Layouts::format_of(s.layout));
      const bool known = live_tenant(s.tenant) && raw(s.layout) / kFormatCount < layouts_.capacity() &&
                         layouts_.live(model) && format != 0;
      if (!expect(known && s.live == 1 && s.ready <= 1, "slab", i, "has no known tenant or layout")) return;
      slot_used_[i].resize(slab_bytes_ / layouts_.layout(model, Layouts::format_of(s.layout)).page_bytes);
    }
  }

  void sessions() {
    for (const SessionRecord& s : tables_.sessions.records()) {
      if (raw(s.id) == 0) continue;
      const auto name = raw(s.id);
      expect(name <= tables_.root_record().last_session, "session", name, "was never given out");
      expect(sessions_.emplace(s.id, &s).second, "session", name, "exists twice");
      expect(live_tenant(s.tenant), "session", name, "has no tenant");
      expect(layouts_.live(s.model), "session", name, "has no model");
      expect(s.credits_target <= kMagazineSlots, "session", name, "has too many credits");
      expect(std::memchr(s.label, 0, sizeof(s.label)) != nullptr, "session", name, "has a label without end");
      if (!wrong_.empty()) return;
    }
  }

  void sequences() {
    const auto records = tables_.sequences.records();
    std::set<std::pair<SessionId, SequenceId>> ids;
    for (std::size_t i = 1; i < records.size(); ++i) {
      const SequenceRecord& q = records[i];
      if ((q.flags & kSequenceLive) == 0) continue;
      const SessionRecord* s = session(q.session);
      expect(s != nullptr && s->tenant == q.tenant, "sequence", i, "belongs to no session of its tenant");
      expect(raw(q.id) != 0 && raw(q.id) < kMaxSequences, "sequence", i, "has an id out of range");
      expect(ids.emplace(q.session, q.id).second, "sequence", i, "has an id that its session uses already");
      expect(q.first_kept <= q.pages && q.tokens <= std::uint64_t{q.pages} * kPageTokens, "sequence", i,
             "is longer than its block table");
      expect(std::uint64_t{q.pages} <= tables_.chunks.records().size() * kChunkPages, "sequence", i,
             "has more pages than there are chunks");
      if (!wrong_.empty()) return;
      chunk_of_[static_cast<std::uint32_t>(i)].resize((q.pages + kChunkPages - 1) / kChunkPages, nullptr);
    }
  }

  void chunks() {
    const auto records = tables_.chunks.records();
    for (std::size_t i = 0; i < records.size(); ++i) {
      const auto owner = chunk_of_.find(records[i].owner);
      if (!expect(records[i].owner < tables_.sequences.records().size(), "chunk", i, "has no owner")) return;
      if (owner == chunk_of_.end() || records[i].ordinal >= owner->second.size()) continue;  // a leftover
      const TableChunk*& place = owner->second[records[i].ordinal];
      if (!expect(place == nullptr, "chunk", i, "has the place of another")) return;
      place = &records[i];
    }
    for (const auto& [sequence, list] : chunk_of_) {
      for (const TableChunk* chunk : list) expect(chunk != nullptr, "sequence", sequence, "lacks a chunk");
    }
  }

  void pages() {
    for (std::uint32_t t = 0; t < files_.size() && wrong_.empty(); ++t) {
      const auto records = files_[t].pages.records();
      for (std::uint32_t i = 0; i < records.size(); ++i) {
        page(TenantId{t + 1}, i, records[i]);
        if (!wrong_.empty()) return;
      }
      parents(records);
    }
  }

  void page(TenantId tenant, std::uint32_t i, const PageRecord& r) {
    if (r.state == PageState::free) {
      expect((r.flags & kPageIndexed) == 0, "page", i, "is free and indexed");
      return;
    }
    expect(i != 0, "page", i, "is the null page");
    expect(static_cast<std::size_t>(r.state) < kPageStates, "page", i, "has an unknown state");
    expect((r.flags & ~kPageFlags) == 0, "page", i, "has unknown flags");
    const auto slabs = tables_.slabs.records();
    if (!expect(raw(r.slab) < slabs.size(), "page", i, "is in no slab")) return;
    const SlabRecord& s = slabs[raw(r.slab)];
    const bool fits = s.live != 0 && s.ready != 0 && s.tenant == tenant && layouts_.live(r.model) &&
                      static_cast<std::uint32_t>(r.format) < kFormatCount &&
                      s.layout == Layouts::id(r.model, r.format) && raw(r.slot) < slot_used_[raw(r.slab)].size();
    if (!expect(fits, "page", i, "does not fit its slab")) return;
    expect(!slot_used_[raw(r.slab)][raw(r.slot)], "page", i, "has the slot of another page");
    slot_used_[raw(r.slab)][raw(r.slot)] = true;
    if (r.state == PageState::credit || r.state == PageState::open || r.state == PageState::sealing) {
      const SessionRecord* owner = session(r.owner);
      expect(owner != nullptr && owner->tenant == tenant && owner->model == r.model && r.format == Format::dense,
             "page", i, "is unfinished and belongs to no session");
      expect(r.seal_sequence < tables_.sequences.records().size(), "page", i, "waits to be sealed in no sequence");
    }
    const bool resident = r.state == PageState::sealed || r.state == PageState::transcoding;
    expect((r.flags & kPageIndexed) == 0 || (resident && (r.flags & kPageHasKey) != 0), "page", i,
           "is indexed and cannot be");
  }

  // Chains of parents end at a root: a page that was walked to before needs no second walk.
  void parents(std::span<const PageRecord> records) {
    std::vector<std::uint32_t> walked(records.size(), 0);
    for (std::uint32_t start = 1; start < records.size(); ++start) {
      if ((records[start].flags & kPageIndexed) == 0) continue;
      std::uint32_t at = start;
      while (at != 0 && walked[at] == 0) {
        walked[at] = start;
        at = raw(records[at].parent);
        const bool good = at == 0 || (at < records.size() && (records[at].flags & kPageIndexed) != 0);
        if (!expect(good, "page", start, "has a parent that is not indexed")) return;
        if (!expect(at == 0 || walked[at] != start, "page", start, "is its own ancestor")) return;
      }
    }
  }

  void block_tables() {
    std::map<std::pair<TenantId, PageId>, std::uint32_t> open;  // unfinished pages -> the sequence that holds them
    for (const auto& [number, list] : chunk_of_) {
      const SequenceRecord& q = tables_.sequences.records()[number];
      const auto pages = files_[raw(q.tenant) - 1].pages.records();
      for (std::uint32_t i = q.first_kept; i < q.pages; ++i) {
        const PageId id = list[i / kChunkPages]->page[i % kChunkPages];
        if (!expect(raw(id) != 0 && raw(id) < pages.size(), "sequence", number, "holds no page")) return;
        const PageRecord& r = pages[raw(id)];
        const bool held = r.state != PageState::free && r.state != PageState::credit && r.state != PageState::retired;
        expect(held, "sequence", number, "holds a page that is free");
        expect(r.model == session(q.session)->model, "sequence", number, "holds a page of another model");
        if (r.state != PageState::open) continue;
        expect(r.owner == q.session, "sequence", number, "holds an open page of another session");
        expect(open.emplace(std::pair{q.tenant, id}, number).second, "sequence", number, "shares an open page");
      }
    }
  }

  const StoreTables& tables_;
  const std::vector<TenantFiles>& files_;
  const std::uint64_t slab_bytes_;
  Layouts layouts_;
  std::string wrong_;
  std::vector<std::vector<bool>> slot_used_;  // by slab
  std::map<SessionId, const SessionRecord*> sessions_;
  std::map<std::uint32_t, std::vector<const TableChunk*>> chunk_of_;  // by sequence, by ordinal
};

std::string check_models(const StoreTables& tables, std::uint64_t slab_bytes) {
  const auto records = tables.models.records();
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (records[i].live == 0) continue;
    const Error error = check_geometry(records[i].geometry, slab_bytes);
    if (i == 0 || error.code != Errc::ok) return "model " + std::to_string(i) + ": " + error.context;
  }
  return "";
}

}  // namespace

std::string check_records(const StoreTables& tables, const std::vector<TenantFiles>& tenants,
                          std::uint64_t slab_bytes) {
  const std::string wrong = check_models(tables, slab_bytes);
  return wrong.empty() ? RecordCheck(tables, tenants, slab_bytes).run() : wrong;
}

}  // namespace kvq

// Every change of a counted place goes through the journal; fresh chunks and places beyond the count need no entry.
#include "daemon/core/sequence_table.h"

#include "kvq/result.h"

namespace kvq {

Hold hold_of(const SequenceRecord& s, std::uint32_t index, std::uint32_t pages, const WindowPolicy& policy) {
  if (index >= pages || index < s.first_kept) return {};
  const bool running = (s.flags & kSequenceRunning) != 0;
  const bool near = index < policy.sink_pages || std::uint64_t{index} + policy.window_pages >= pages;
  return {.reference = true,
          .running = running,
          .protect = (running && near) || (s.flags & kSequenceFloorDense) != 0,
          .immobile = (s.flags & kSequenceImmobile) != 0};
}

SequenceTable::SequenceTable(std::span<SequenceRecord> records, std::span<TableChunk> chunks,
                             JournalRegion record_journal, JournalRegion chunk_journal)
    : records_(records),
      chunks_(chunks),
      record_journal_(record_journal),
      chunk_journal_(chunk_journal),
      chunk_list_(records.size()) {
  KVQ_ASSERT(records.size() > 1);
  for (std::size_t i = records.size() - 1; i > 0; --i) {
    if ((records[i].flags & kSequenceLive) == 0) {
      free_records_.push_back(static_cast<std::uint32_t>(i));
    } else {
      chunk_list_[i].resize((records[i].pages + kChunkPages - 1) / kChunkPages);
    }
  }
  for (std::size_t i = chunks.size(); i > 0; --i) {
    TableChunk& c = chunks[i - 1];
    if (c.owner != 0 && c.ordinal < chunk_list_[c.owner].size()) {
      chunk_list_[c.owner][c.ordinal] = static_cast<std::uint32_t>(i - 1);
    } else {
      c.owner = 0;
      free_chunks_.push_back(static_cast<std::uint32_t>(i - 1));
    }
  }
}

std::optional<SequenceIndex> SequenceTable::create(SessionId session, SequenceId id, TenantId tenant,
                                                   std::uint16_t flags, std::uint64_t now_ms) {
  if (free_records_.empty()) return std::nullopt;
  const SequenceIndex s{free_records_.back()};
  free_records_.pop_back();
  SequenceRecord& r = change(s);
  r = SequenceRecord{};
  r.session = session;
  r.id = id;
  r.tenant = tenant;
  r.last_use_ms = now_ms;
  r.flags = flags | kSequenceLive;
  return s;
}

void SequenceTable::destroy(SequenceIndex s) {
  KVQ_ASSERT((record(s).flags & kSequenceLive) != 0 && record(s).pages == 0 && chunk_list_[raw(s)].empty());
  change(s).flags = 0;
  free_records_.push_back(raw(s));
}

PageId SequenceTable::page(SequenceIndex s, std::uint32_t index) const {
  KVQ_ASSERT(index < record(s).pages);
  return chunks_[chunk_list_[raw(s)][index / kChunkPages]].page[index % kChunkPages];
}

bool SequenceTable::append(SequenceIndex s, PageId page) {
  SequenceRecord& r = change(s);
  std::vector<std::uint32_t>& list = chunk_list_[raw(s)];
  if (r.pages == list.size() * kChunkPages) {
    if (free_chunks_.empty()) return false;
    const std::uint32_t fresh = free_chunks_.back();
    free_chunks_.pop_back();
    chunk_journal_.save(&chunks_[fresh], 8);
    chunks_[fresh].ordinal = static_cast<std::uint32_t>(list.size());
    chunks_[fresh].owner = raw(s);
    list.push_back(fresh);
  }
  chunk_of(s, r.pages).page[r.pages % kChunkPages] = page;
  ++r.pages;
  return true;
}

void SequenceTable::cut(SequenceIndex s, std::uint32_t pages) {
  SequenceRecord& r = change(s);
  KVQ_ASSERT(pages <= r.pages);
  r.pages = pages;
  if (r.first_kept > pages) r.first_kept = pages;
  if (r.tokens > std::uint64_t{pages} * kPageTokens) r.tokens = std::uint64_t{pages} * kPageTokens;
  std::vector<std::uint32_t>& list = chunk_list_[raw(s)];
  while (list.size() * kChunkPages >= pages + kChunkPages) {
    chunk_journal_.save(&chunks_[list.back()], 8);
    chunks_[list.back()].owner = 0;
    free_chunks_.push_back(list.back());
    list.pop_back();
  }
}

void SequenceTable::forget_before(SequenceIndex s, std::uint32_t index) {
  SequenceRecord& r = change(s);
  KVQ_ASSERT(index <= r.pages);
  const std::uint32_t from = r.first_kept;
  if (index <= from) return;
  r.first_kept = index;
  for (std::uint32_t i = from; i < index; ++i) {
    TableChunk& c = chunk_of(s, i);
    chunk_journal_.save(c);
    c.page[i % kChunkPages] = kNullPage;
  }
}

void SequenceTable::commit(SequenceIndex s, std::uint64_t tokens, std::uint64_t now_ms) {
  SequenceRecord& r = change(s);
  r.tokens = tokens;
  r.last_use_ms = now_ms;
}

}  // namespace kvq

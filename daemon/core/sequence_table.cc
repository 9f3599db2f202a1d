// Writes block tables in the order that sequence_table.h promises. The compiler may not reorder the stores that a crash
// could split, hence the signal fences; no other process reads this memory while the daemon lives.
#include "daemon/core/sequence_table.h"

#include <atomic>

#include "kvq/result.h"

namespace kvq {
namespace {

void ordered() { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace

Hold hold_of(const SequenceRecord& s, std::uint32_t index, std::uint32_t pages, const WindowPolicy& policy) {
  if (index >= pages || index < s.first_kept) return {};
  const bool running = (s.flags & kSequenceRunning) != 0;
  const bool near = index < policy.sink_pages || std::uint64_t{index} + policy.window_pages >= pages;
  return {.reference = true,
          .running = running,
          .protect = (running && near) || (s.flags & kSequenceFloorDense) != 0,
          .immobile = (s.flags & kSequenceImmobile) != 0};
}

SequenceTable::SequenceTable(std::span<SequenceRecord> records, std::span<TableChunk> chunks)
    : records_(records), chunks_(chunks), chunk_list_(records.size()) {
  KVQ_ASSERT(records.size() > 1);
  for (std::size_t i = records.size() - 1; i > 0; --i) free_records_.push_back(static_cast<std::uint32_t>(i));
  for (std::size_t i = chunks.size(); i > 0; --i) free_chunks_.push_back(static_cast<std::uint32_t>(i - 1));
}

std::optional<SequenceIndex> SequenceTable::create(SessionId session, SequenceId id, TenantId tenant,
                                                   std::uint16_t flags, std::uint64_t now_ms) {
  if (free_records_.empty()) return std::nullopt;
  const SequenceIndex s{free_records_.back()};
  free_records_.pop_back();
  SequenceRecord& r = at(s);
  r = SequenceRecord{};
  r.session = session;
  r.id = id;
  r.tenant = tenant;
  r.last_use_ms = now_ms;
  ordered();
  r.flags = flags | kSequenceLive;
  return s;
}

void SequenceTable::destroy(SequenceIndex s) {
  KVQ_ASSERT((record(s).flags & kSequenceLive) != 0 && record(s).pages == 0 && chunk_list_[raw(s)].empty());
  at(s).flags = 0;
  free_records_.push_back(raw(s));
}

PageId SequenceTable::page(SequenceIndex s, std::uint32_t index) const {
  KVQ_ASSERT(index < record(s).pages);
  return chunks_[chunk_list_[raw(s)][index / kChunkPages]].page[index % kChunkPages];
}

bool SequenceTable::append(SequenceIndex s, PageId page) {
  SequenceRecord& r = at(s);
  std::vector<std::uint32_t>& list = chunk_list_[raw(s)];
  if (r.pages == list.size() * kChunkPages) {
    if (free_chunks_.empty()) return false;
    const std::uint32_t fresh = free_chunks_.back();
    free_chunks_.pop_back();
    chunks_[fresh].ordinal = static_cast<std::uint32_t>(list.size());
    ordered();
    chunks_[fresh].owner = raw(s);
    list.push_back(fresh);
  }
  chunk_of(s, r.pages).page[r.pages % kChunkPages] = page;
  ordered();
  ++r.pages;
  return true;
}

void SequenceTable::cut(SequenceIndex s, std::uint32_t pages) {
  SequenceRecord& r = at(s);
  KVQ_ASSERT(pages <= r.pages);
  r.pages = pages;
  if (r.first_kept > pages) r.first_kept = pages;
  if (r.tokens > std::uint64_t{pages} * kPageTokens) r.tokens = std::uint64_t{pages} * kPageTokens;
  ordered();
  std::vector<std::uint32_t>& list = chunk_list_[raw(s)];
  while (list.size() * kChunkPages >= pages + kChunkPages) {
    chunks_[list.back()].owner = 0;
    free_chunks_.push_back(list.back());
    list.pop_back();
  }
}

void SequenceTable::forget_before(SequenceIndex s, std::uint32_t index) {
  SequenceRecord& r = at(s);
  KVQ_ASSERT(index <= r.pages);
  const std::uint32_t from = r.first_kept;
  if (index <= from) return;
  r.first_kept = index;
  ordered();
  for (std::uint32_t i = from; i < index; ++i) chunk_of(s, i).page[i % kChunkPages] = kNullPage;
}

void SequenceTable::commit(SequenceIndex s, std::uint64_t tokens, std::uint64_t now_ms) {
  at(s).tokens = tokens;
  at(s).last_use_ms = now_ms;
}

}  // namespace kvq

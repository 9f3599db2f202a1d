// Truncate, drop and fork.
//
// Invariant: a page whose seal was asked for is never written again, even if the daemon has not sealed it yet: cutting
// inside it copies the kept tokens to a fresh page. A fork shares every full page: the ring keeps order, so the daemon
// has seen the seal of each before the fork, and a page whose seal waits for the end of its step may be shared inside
// its session.
#include <algorithm>

#include "client/last_error.h"
#include "client/sequence.h"

namespace kvq::client {
namespace {

std::uint64_t pages_for(std::uint64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

void give_back(Rings& rings, std::span<const MagazineItem> items) {
  for (const MagazineItem& item : items) {
    rings.push({.kind = CommandKind::return_credit, .page = item.page, .generation = item.generation});
  }
}

// Takes `count` fresh pages out of the magazine.
kvq_status take_credits(Model& model, std::uint32_t count, std::uint32_t deadline_ms, std::vector<MagazineItem>& out) {
  Model::Lock lock = model.lock();
  if (auto s = model.prepare(lock, 0, count, Deadline(deadline_ms)); s != KVQ_OK) return s;
  while (out.size() < count) out.push_back(model.rings(lock).pop_credit());
  return KVQ_OK;
}

}  // namespace

kvq_status Sequence::truncate(std::uint64_t tokens, std::uint32_t deadline_ms) {
  if (auto s = check_usable("kvq_truncate"); s != KVQ_OK) return s;
  if (tokens > committed_) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_truncate to %llu tokens, %llu are committed",
                static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(committed_));
  }
  if (tokens == committed_) return KVQ_OK;
  if (tokens % kPageTokens != 0 && tokens / kPageTokens < first_kept_) {
    return fail(KVQ_ERR_INVALID_ARGUMENT,
                "kvq_truncate to %llu tokens: that page was dropped (kept from token %llu on)",
                static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(first_kept_ * kPageTokens));
  }
  const bool inside_sealed = tokens % kPageTokens != 0 && tokens / kPageTokens < full_pages();
  return inside_sealed ? cut_inside_sealed(tokens, deadline_ms) : cut(tokens, pages_for(tokens));
}

kvq_status Sequence::cut(std::uint64_t tokens, std::uint64_t keep_pages) {
  Model::Lock lock = model_->lock();
  if (auto s = model_->prepare(lock, 2, 0, Deadline(0)); s != KVQ_OK) return s;
  Command truncate = command(CommandKind::truncate);
  truncate.index = static_cast<std::uint32_t>(keep_pages);
  model_->rings(lock).push(truncate);
  places_.resize(keep_pages);
  committed_ = tokens;
  tokens_.resize(tokens);
  if (keys_.size() > full_pages()) keys_.resize(full_pages());
  first_kept_ = std::min<std::uint64_t>(first_kept_, places_.size());
  push_commit(model_->rings(lock));
  model_->rings(lock).wake_daemon_if_needed();
  return KVQ_OK;
}

kvq_status Sequence::cut_inside_sealed(std::uint64_t tokens, std::uint32_t deadline_ms) {
  if (model_->control()) {
    return fail(KVQ_ERR_INVALID_ARGUMENT,
                "kvq_truncate to %llu tokens cuts inside a sealed page, which a control session cannot copy; "
                "cut at a multiple of %u",
                static_cast<unsigned long long>(tokens), kPageTokens);
  }
  std::vector<MagazineItem> fresh;
  if (auto s = take_credits(*model_, 1, deadline_ms, fresh); s != KVQ_OK) return s;
  const std::uint64_t at = tokens / kPageTokens;
  const kvq_status copied = model_->copy_page(places_[at].page, fresh[0].page, written_in_);
  Model::Lock lock = model_->lock();
  if (auto s = model_->prepare(lock, 3, 0, Deadline(0)); s != KVQ_OK) return s;
  if (copied != KVQ_OK) {
    give_back(model_->rings(lock), fresh);
    return copied;
  }
  Command truncate = command(CommandKind::truncate);
  truncate.index = static_cast<std::uint32_t>(at);
  model_->rings(lock).push(truncate);
  places_.resize(at);
  take(model_->rings(lock), fresh[0], at);
  committed_ = tokens;
  tokens_.resize(tokens);
  if (keys_.size() > at) keys_.resize(at);
  push_commit(model_->rings(lock));
  model_->rings(lock).wake_daemon_if_needed();
  return KVQ_OK;
}

kvq_status Sequence::drop_before(std::uint64_t position) {
  if (auto s = check_usable("kvq_drop_before"); s != KVQ_OK) return s;
  const std::uint64_t end = std::min(position, committed_) / kPageTokens;
  if (end <= first_kept_) return KVQ_OK;
  Model::Lock lock = model_->lock();
  if (auto s = model_->prepare(lock, 1, 0, Deadline(0)); s != KVQ_OK) return s;
  Command drop = command(CommandKind::drop_before);
  drop.index = static_cast<std::uint32_t>(end);
  model_->rings(lock).push(drop);
  model_->rings(lock).wake_daemon_if_needed();
  for (std::uint64_t i = first_kept_; i < end; ++i) places_[i] = {kNullPage, 0};
  first_kept_ = end;
  return KVQ_OK;
}

kvq_status Sequence::fork(std::uint32_t deadline_ms, std::unique_ptr<Sequence>& out) {
  if (auto s = check_usable("kvq_fork"); s != KVQ_OK) return s;
  if (auto s = model_->check_admission(); s != KVQ_OK) return s;
  const bool unfinished = committed_ % kPageTokens != 0;
  if (unfinished && model_->control()) {
    return fail(KVQ_ERR_INVALID_ARGUMENT,
                "kvq_fork must copy the unfinished last page, which a control session cannot; fork when a "
                "multiple of %u tokens is committed",
                kPageTokens);
  }
  std::vector<MagazineItem> fresh;
  if (auto s = take_credits(*model_, unfinished ? 1 : 0, deadline_ms, fresh); s != KVQ_OK) return s;
  const kvq_status copied =
      unfinished ? model_->copy_page(places_[full_pages()].page, fresh[0].page, written_in_) : KVQ_OK;
  std::unique_ptr<Sequence> child(new Sequence(model_));
  if (auto s = share_with(*child, fresh, copied); s != KVQ_OK) return s;
  out = std::move(child);
  return KVQ_OK;
}

// Pushes the commands of a fork, unless its copy failed: then the fresh page goes back.
kvq_status Sequence::share_with(Sequence& child, const std::vector<MagazineItem>& fresh, kvq_status copied) {
  Model::Lock lock = model_->lock();
  if (auto s = model_->prepare(lock, 3, 0, Deadline(0)); s != KVQ_OK) return s;
  Rings& rings = model_->rings(lock);
  if (copied == KVQ_OK) copied = model_->take_sequence_id(lock, child.id_);
  if (copied != KVQ_OK) {
    give_back(rings, fresh);
    return copied;
  }
  child.tokens_ = tokens_;
  child.keys_ = keys_;
  child.extra_keys_ = extra_keys_;
  child.committed_ = committed_;
  child.written_in_ = written_in_;
  child.first_kept_ = first_kept_;
  child.private_ = private_;
  child.floor_dense_ = floor_dense_;
  child.places_.assign(places_.begin(), places_.begin() + static_cast<std::ptrdiff_t>(full_pages()));
  Command begin = child.command(CommandKind::fork);
  begin.index = static_cast<std::uint32_t>(full_pages());
  begin.argument = raw(id_);
  if (floor_dense_) begin.flags |= kFormatFloorDense;
  rings.push(begin);
  for (const MagazineItem& item : fresh) child.take(rings, item, child.places_.size());
  child.push_commit(rings);
  rings.wake_daemon_if_needed();
  return KVQ_OK;
}

}  // namespace kvq::client

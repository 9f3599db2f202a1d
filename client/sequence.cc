// Open, reserve, commit, release: the life of a sequence without edits.
//
// Invariant: commands of one sequence enter the ring in the order of the calls, and the pages they name are this
// session's.
#include "client/sequence.h"

#include <algorithm>
#include <utility>

#include "client/last_error.h"

namespace kvq::client {
namespace {

constexpr std::uint32_t kCommandsPerRound = kCommandSlots / 2;

}  // namespace

kvq_status read_extra_keys(const kvq_extra_key* keys, std::size_t count, std::vector<ExtraKey>& out) {
  if (count != 0 && keys == nullptr)
    return fail(KVQ_ERR_INVALID_ARGUMENT, "extra_keys is NULL, extra_key_count is %zu", count);
  for (std::size_t i = 0; i < count; ++i) {
    if (keys[i].data == nullptr || keys[i].data_bytes == 0 || keys[i].data_bytes > UINT32_MAX) {
      return fail(KVQ_ERR_INVALID_ARGUMENT, "extra key %zu: data is NULL or has %zu bytes", i, keys[i].data_bytes);
    }
    out.push_back(
        {keys[i].first_token, keys[i].tokens, std::string(static_cast<const char*>(keys[i].data), keys[i].data_bytes)});
  }
  return KVQ_OK;
}

Command Sequence::command(CommandKind kind) const { return {.kind = kind, .sequence = id_}; }

kvq_status Sequence::check_usable(const char* call) const {
  if (auto s = model_->check_session(); s != KVQ_OK) return s;
  if (view_)
    return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: the sequence is a view of another session's; call it there", call);
  if (parked_) return fail(KVQ_ERR_INVALID_ARGUMENT, "%s: sequence %u is parked; resume it first", call, raw(id_));
  return KVQ_OK;
}

kvq_status Sequence::open(std::shared_ptr<Model> model, std::span<const std::uint32_t> tokens,
                          const kvq_open_options& options, std::unique_ptr<Sequence>& out) {
  if (auto s = model->check_admission(); s != KVQ_OK) return s;
  std::unique_ptr<Sequence> made(new Sequence(model));
  if (auto s = read_extra_keys(options.extra_keys, options.extra_key_count, made->extra_keys_); s != KVQ_OK) return s;
  made->private_ = options.private_pages != 0;
  made->floor_dense_ = options.format_floor_dense != 0 || model->format_floor_dense();
  CachedPrefix prefix;
  if (!made->private_) prefix = find_cached_prefix(*model, tokens, made->extra_keys_, made->floor_dense_);
  {
    const Model::Lock lock = model->lock();
    if (auto s = model->take_sequence_id(lock, made->id_); s != KVQ_OK) return s;
  }
  if (auto s = made->attach_or_open(prefix); s != KVQ_OK) {
    const SequenceId id = std::exchange(made->id_, SequenceId{0});
    if (s == KVQ_ERR_DAEMON_GONE) {
      model->abandon(id);
    } else {
      const Model::Lock lock = model->lock();
      model->give_sequence_id(lock, id);
    }
    return s;
  }
  made->committed_ = made->places_.size() * kPageTokens;
  made->tokens_.assign(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(made->committed_));
  out = std::move(made);
  return KVQ_OK;
}

// Attaches as much of `prefix` as the daemon still has: the hits are hints, and each refusal makes the next try
// shorter.
kvq_status Sequence::attach_or_open(CachedPrefix& prefix) {
  std::vector<PageId> pages;
  std::size_t want = prefix.hits.size();
  while (want != 0) {
    const kvq_status attached = model_->session().attach({.sequence = id_,
                                                          .last = prefix.hits[want - 1],
                                                          .pages = static_cast<std::uint32_t>(want),
                                                          .key = prefix.keys[want - 1],
                                                          .format_floor_dense = floor_dense_},
                                                         pages);
    if (attached == KVQ_OK) break;
    if (attached != KVQ_ERR_STALE_ID && attached != KVQ_ERR_LOST_PAGE) return attached;
    want = std::min(want / 2, still_cached(*model_, prefix, floor_dense_));
  }
  if (want == 0) {
    Model::Lock lock = model_->lock();
    if (auto s = model_->prepare(lock, 1, 0, Deadline(0)); s != KVQ_OK) return s;
    Command open = command(CommandKind::open);
    if (floor_dense_) open.flags |= kFormatFloorDense;
    model_->rings(lock).push(open);
    model_->rings(lock).wake_daemon_if_needed();
    return KVQ_OK;
  }
  for (std::size_t i = 0; i < want; ++i) places_.push_back({pages[i], model_->entry(pages[i]).generation});
  keys_.assign(prefix.keys.begin(), prefix.keys.begin() + static_cast<std::ptrdiff_t>(want));
  return KVQ_OK;
}

Sequence::~Sequence() {
  if (!view_ && id_ != SequenceId{0}) model_->release(id_);
}

void Sequence::take(Rings& rings, const MagazineItem& item, std::uint64_t at) {
  Command take = command(CommandKind::take);
  take.page = item.page;
  take.generation = item.generation;
  take.index = static_cast<std::uint32_t>(at);
  rings.push(take);
  places_.push_back({item.page, item.generation});
}

kvq_status Sequence::reserve(std::span<Sequence* const> sequences, const std::uint64_t* tokens,
                             std::uint32_t deadline_ms) {
  std::uint64_t total = 0;
  const auto missing = [](const Sequence& s, std::uint64_t more) {
    const std::uint64_t pages = (s.committed_ + more + kPageTokens - 1) / kPageTokens;
    return pages > s.places_.size() ? pages - s.places_.size() : 0;
  };
  Model* const model = sequences.front()->model_.get();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (auto s = sequences[i]->check_usable("kvq_reserve"); s != KVQ_OK) return s;
    if (sequences[i]->model_.get() != model) {
      return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_reserve_batch: sequence %zu belongs to another model than the first",
                  i);
    }
    if (tokens[i] > std::uint64_t{kMagazineSlots} * kPageTokens)
      total = kMagazineSlots;  // too many, however it goes on
    total += missing(*sequences[i], std::min(tokens[i], std::uint64_t{kMagazineSlots} * kPageTokens));
  }
  if (total == 0) return KVQ_OK;
  if (total > kMagazineSlots) {
    return fail(KVQ_ERR_LIMIT_REACHED, "more than %u pages in one kvq_reserve; reserve at most %u tokens at a time",
                kMagazineSlots, kMagazineSlots * kPageTokens);
  }
  if (auto s = model->check_admission(); s != KVQ_OK) return s;
  Model::Lock lock = model->lock();
  const auto pages = static_cast<std::uint32_t>(total);
  if (auto s = model->prepare(lock, pages, pages, Deadline(deadline_ms)); s != KVQ_OK) return s;
  Rings& rings = model->rings(lock);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    for (std::uint64_t n = missing(*sequences[i], tokens[i]); n > 0; --n) {
      sequences[i]->take(rings, rings.pop_credit(), sequences[i]->places_.size());
    }
  }
  rings.wake_daemon_if_needed();
  return KVQ_OK;
}

Command Sequence::seal_command(std::uint64_t page, std::uint64_t step, std::uint32_t step_session) const {
  Command seal = command(CommandKind::seal);
  seal.page = places_[page].page;
  seal.generation = places_[page].generation;
  seal.index = static_cast<std::uint32_t>(page);
  seal.serial = step;
  seal.argument = step_session;
  if (private_) {
    seal.flags |= kPrivate;
  } else {
    std::copy(keys_[page].begin(), keys_[page].end(), seal.key);
  }
  return seal;
}

void Sequence::push_commit(Rings& rings) const {
  Command commit = command(CommandKind::commit);
  commit.index = static_cast<std::uint32_t>(committed_);
  rings.push(commit);
}

kvq_status Sequence::commit(std::span<const std::uint32_t> tokens, std::uint64_t step, std::uint32_t step_session) {
  if (auto s = check_usable("kvq_commit"); s != KVQ_OK) return s;
  if (committed_ + tokens.size() > places_.size() * kPageTokens) {
    return fail(KVQ_ERR_INVALID_ARGUMENT,
                "%zu tokens past %llu committed ones do not fit into %zu reserved pages; reserve first", tokens.size(),
                static_cast<unsigned long long>(committed_), places_.size());
  }
  const bool own_step = step_session == 0 || step_session == raw(model_->session_id());
  if (own_step && step > model_->steps().last()) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "step %llu has not begun; the newest is %llu",
                static_cast<unsigned long long>(step), static_cast<unsigned long long>(model_->steps().last()));
  }
  if (tokens.empty()) return KVQ_OK;
  const std::uint64_t first_new = full_pages();
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  committed_ = tokens_.size();
  if (own_step) written_in_ = std::max(written_in_, step);
  if (!private_) {
    PrefixHasher& hasher = thread_hasher();
    for (std::uint64_t p = first_new; p < full_pages(); ++p) {
      keys_.push_back(
          hasher.page(p == 0 ? model_->root() : keys_[p - 1], p, tokens_.data() + p * kPageTokens, extra_keys_));
    }
  }
  Model::Lock lock = model_->lock();
  for (std::uint64_t p = first_new;;) {
    const std::uint64_t end = std::min<std::uint64_t>(full_pages(), p + kCommandsPerRound);
    if (auto s = model_->prepare(lock, static_cast<std::uint32_t>(end - p) + 1, 0, Deadline(0)); s != KVQ_OK) return s;
    for (; p < end; ++p) model_->rings(lock).push(seal_command(p, step, own_step ? 0 : step_session));
    if (end == full_pages()) {
      if (committed_ % kPageTokens != 0) push_commit(model_->rings(lock));  // else the last seal says it
      break;
    }
  }
  model_->rings(lock).wake_daemon_if_needed();
  return KVQ_OK;
}

kvq_status Sequence::park() {
  if (auto s = check_usable("kvq_park"); s != KVQ_OK) return s;
  Model::Lock lock = model_->lock();
  if (auto s = model_->prepare(lock, 1, 0, Deadline(0)); s != KVQ_OK) return s;
  model_->rings(lock).push(command(CommandKind::park));
  model_->rings(lock).wake_daemon_if_needed();
  parked_ = true;
  return KVQ_OK;
}

kvq_status Sequence::resume(std::uint32_t deadline_ms) {
  if (auto s = model_->check_session(); s != KVQ_OK) return s;
  if (view_ || !parked_) return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_resume: sequence %u is not parked", raw(id_));
  if (auto s = model_->session().resume(id_, deadline_ms); s != KVQ_OK) return s;
  parked_ = false;
  return KVQ_OK;
}

}  // namespace kvq::client

// Invariant: a set is checked as a whole before any of it takes effect.
#include "client/aliases.h"

#include <algorithm>
#include <mutex>

#include "client/last_error.h"

namespace kvq::client {

kvq_status Aliases::set(const kvq_alias* aliases, std::size_t count, std::uint32_t page_capacity) {
  std::int32_t highest = -1;
  for (std::size_t i = 0; i < count; ++i) {
    if (aliases[i].alias < 0 || aliases[i].alias > kMaxAlias) {
      return fail(KVQ_ERR_INVALID_ARGUMENT, "alias %d at %zu is outside 0 .. %d", aliases[i].alias, i, kMaxAlias);
    }
    if (aliases[i].page < 0 || static_cast<std::uint32_t>(aliases[i].page) >= page_capacity) {
      return fail(KVQ_ERR_STALE_ID, "page %d of alias %d is outside the directory of %u pages", aliases[i].page,
                  aliases[i].alias, page_capacity);
    }
    highest = std::max(highest, aliases[i].alias);
  }
  const std::unique_lock lock(mutex_);
  if (highest >= static_cast<std::int32_t>(pages_.size()))
    pages_.resize(static_cast<std::size_t>(highest) + 1, KVQ_NULL_PAGE);
  for (std::size_t i = 0; i < count; ++i) pages_[static_cast<std::size_t>(aliases[i].alias)] = aliases[i].page;
  return KVQ_OK;
}

void Aliases::translate_slots(const std::int64_t* in, std::size_t count, std::int64_t* out) const {
  const std::shared_lock lock(mutex_);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] =
        in[i] < 0 ? in[i] : std::int64_t{page_of(in[i] / KVQ_PAGE_TOKENS)} * KVQ_PAGE_TOKENS + in[i] % KVQ_PAGE_TOKENS;
  }
}

void Aliases::translate_row(const std::int32_t* in, std::size_t count, std::int32_t* out) const {
  const std::shared_lock lock(mutex_);
  for (std::size_t i = 0; i < count; ++i) out[i] = page_of(in[i]);
}

}  // namespace kvq::client

// Aliases: an engine's own block numbers for kvq pages.
//
// Invariant: an alias that was never set, or was cleared, means the null page. Set between steps; reading is safe
// against a concurrent set all the same.
#pragma once

#include <cstdint>
#include <shared_mutex>
#include <vector>

#include "kvq/kvq.h"

namespace kvq::client {

inline constexpr std::int32_t kMaxAlias = (1 << 24) - 1;

class Aliases {
 public:
  kvq_status set(const kvq_alias* aliases, std::size_t count, std::uint32_t page_capacity);

  // slots of aliases -> slots of pages. Negative slots stay as they are.
  void translate_slots(const std::int64_t* in, std::size_t count, std::int64_t* out) const;
  // One row of a block table.
  void translate_row(const std::int32_t* in, std::size_t count, std::int32_t* out) const;

 private:
  std::int32_t page_of(std::int64_t alias) const {
    return alias >= 0 && alias < static_cast<std::int64_t>(pages_.size()) ? pages_[static_cast<std::size_t>(alias)]
                                                                          : KVQ_NULL_PAGE;
  }

  mutable std::shared_mutex mutex_;
  std::vector<std::int32_t> pages_;  // by alias; guarded by mutex_
};

}  // namespace kvq::client

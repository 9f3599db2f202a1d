// What operators see of sequences and of the prefix index, in plain values.
//
// Invariant: no key and no token is in it: who may look at a node need not know what is said on it.
#pragma once

#include <cstdint>
#include <vector>

#include "kvq/types.h"

namespace kvq {

struct FormatUse {
  std::uint64_t pages = 0, bytes = 0;
};

struct SequenceStatus {
  SessionId session{};
  TenantId tenant{};
  SequenceId sequence{};
  bool running = false;                            // else parked
  std::uint64_t pages = 0, tokens = 0;             // held; committed, with those it gave up
  FormatUse format[kFormatCount];                  // of its pages, shared ones in full
  std::uint64_t shared_pages = 0, lost_pages = 0;  // held by another sequence, too; whose content is gone
  std::uint64_t idle_ms = 0;                       // since its last commit
};

struct SequenceList {
  std::uint64_t total = 0;  // that were asked for
  std::vector<SequenceStatus>
      longest;  // at most the limit, and of at most StoreConfig::most_pages_looked pages, but for the first
};

// A leaf of the prefix index with all before it.
struct ChainStatus {
  TenantId tenant{};
  PageId page{};  // the leaf
  std::uint16_t generation = 0;
  std::uint64_t pages = 0;
  FormatUse format[kFormatCount];
  std::uint32_t references = 0;  // sequences that hold the leaf
  std::uint64_t idle_ms = 0;
};

struct PrefixUse {
  TenantId tenant{};
  std::uint64_t capacity = 0;                // places of its table
  std::uint64_t indexed[kFormatCount] = {};  // pages that it names
  std::uint64_t cached[kFormatCount] = {};   // of these: held by no sequence
};

struct PrefixStatus {
  std::vector<PrefixUse> tenants;
  std::vector<ChainStatus> chains;  // the longest unused first
  // False: there was more than StoreConfig::most_pages_looked. What is missing are chains that sequences hold, and the
  // last of those that would be listed.
  bool complete = true;
};

}  // namespace kvq

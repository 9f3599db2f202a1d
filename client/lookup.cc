// Invariant: keys are computed one page further than pages are found: while a page is hashed, the table's bucket of the
// page before it comes into the cache.
#include "client/lookup.h"

namespace kvq::client {
namespace {

// Whether the hit's page can be used now; `entry` says how it is stored.
bool usable(const Model& model, const PrefixHit& hit, bool dense_only, Entry& entry) {
  if (hit.page == kNullPage || raw(hit.page) >= model.memory().directory().capacity) return false;
  entry = model.entry(hit.page);
  if (entry.generation != hit.generation) return false;
  if (entry.state == EntryState::sealed) return !dense_only || entry.format == Format::dense;
  return entry.state == EntryState::host && !dense_only;
}

}  // namespace

CachedPrefix find_cached_prefix(const Model& model, std::span<const std::uint32_t> tokens,
                                std::span<const ExtraKey> extra_keys, bool dense_only) {
  CachedPrefix found;
  PrefixHasher& hasher = thread_hasher();
  const PrefixHeader& header = model.memory().prefix_header();
  const Bucket* buckets = model.memory().buckets();
  const std::uint64_t full_pages = tokens.size() / kPageTokens;
  if (full_pages == 0) return found;
  const auto key_of = [&](const Key& parent, std::uint64_t page) {
    const Key key = hasher.page(parent, page, tokens.data() + page * kPageTokens, extra_keys);
    __builtin_prefetch(&buckets[key_word(key, 2) & (header.buckets - 1)]);
    return key;
  };
  Key key = key_of(model.root(), 0);
  for (std::uint64_t page = 0; page < full_pages; ++page) {
    const Key next = page + 1 < full_pages ? key_of(key, page + 1) : Key{};
    const PrefixHit hit = find_prefix(header, buckets, key);
    Entry entry{};
    if (!usable(model, hit, dense_only, entry)) break;
    (entry.state == EntryState::host ? found.host_pages
     : entry.format == Format::dense ? found.dense_pages
                                     : found.quantized_pages) += 1;
    found.keys.push_back(key);
    found.hits.push_back(hit);
    key = next;
  }
  return found;
}

std::size_t still_cached(const Model& model, const CachedPrefix& prefix, bool dense_only) {
  std::size_t pages = 0;
  Entry entry{};
  while (pages < prefix.hits.size()) {
    const PrefixHit hit = find_prefix(model.memory().prefix_header(), model.memory().buckets(), prefix.keys[pages]);
    const PrefixHit& known = prefix.hits[pages];
    if (hit.page != known.page || hit.generation != known.generation || !usable(model, hit, dense_only, entry)) break;
    ++pages;
  }
  return pages;
}

}  // namespace kvq::client

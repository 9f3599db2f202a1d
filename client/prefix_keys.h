// Prefix keys: the chained SHA-256 names of full pages, exactly as prefix_table.h defines them.
//
// Invariant: a key depends on everything that changes a page's K and V (salt, model, all tokens up to the page's end,
// extra keys) and on nothing else: not on the process, the format or the time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvq/page_format.h"
#include "kvq/prefix_table.h"

namespace kvq::client {

// A caller's extra key, copied: applies to every page that overlaps [first_token, first_token + tokens).
struct ExtraKey {
  std::uint64_t first_token = 0;
  std::uint64_t tokens = 0;
  std::string data;
};

// Computes keys with one reused digest context. One thread at a time; thread_hasher() gives each thread its own.
class PrefixHasher {
 public:
  PrefixHasher();
  ~PrefixHasher();
  PrefixHasher(const PrefixHasher&) = delete;
  PrefixHasher& operator=(const PrefixHasher&) = delete;

  Key root(std::span<const std::uint8_t, 32> salt, std::span<const std::uint8_t, 32> fingerprint,
           const ModelGeometry& geometry);

  // Identity of a model without the tenant's secret salt; travels in exported sequences.
  Key model_digest(std::span<const std::uint8_t, 32> fingerprint, const ModelGeometry& geometry);

  // Key of page number `page` of a sequence; `tokens` are its kPageTokens token ids.
  Key page(const Key& parent, std::uint64_t page, const std::uint32_t* tokens, std::span<const ExtraKey> extra_keys);

 private:
  struct Digest;
  Key hash(const std::string& bytes);
  std::unique_ptr<Digest> digest_;
  std::string scratch_;
};

PrefixHasher& thread_hasher();

}  // namespace kvq::client

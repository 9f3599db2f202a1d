// The prefix index: the daemon's side of the shared prefix table (kvq/prefix_table.h), which names sealed pages by
// content.
//
// Invariant: a bucket's page is always indexed by its record, and each indexed page's parent is indexed, so that a
// chain found at its end can be walked to its root. A key can be missed (while the table is written or rebuilt, or when
// a rebuild of a crowded neighbourhood found no place for it); no reader sees a bucket that is half one key and half
// another.
#pragma once

#include <span>

#include "daemon/core/page_table.h"
#include "kvq/prefix_table.h"

namespace kvq {

class PrefixIndex {
 public:
  // `buckets`: a power of two of them, all zero; they outlive the index.
  PrefixIndex(std::span<Bucket> buckets, PageTable& pages);
  // Writes the buckets anew from the records, whatever they hold; readers may look meanwhile, and miss.
  void adopt();

  // The indexed page with exactly this content, or the null page.
  PageId find(const Key& key) const;
  // Names `page` (sealing, with its key set). False: the content is named already or its neighbourhood is full.
  bool insert(PageId page, PageId parent);
  void erase(PageId page);

  std::uint32_t size() const { return size_; }
  std::uint32_t tombstones() const { return tombstones_; }

 private:
  std::size_t bucket_of(PageId page) const;
  bool put(PageId page);
  void rebuild();
  std::size_t mask() const { return buckets_.size() - 1; }

  std::span<Bucket> buckets_;
  PageTable& pages_;
  std::uint32_t size_ = 0, tombstones_ = 0;
};

}  // namespace kvq

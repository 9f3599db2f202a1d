// A list of page ids ordered by last use, oldest first, threaded through arrays that its owner keeps.
//
// Invariant: page 0 (the null page) is never in a list, so 0 means "no neighbour". Insertion walks from both ends at
// once: nearly all pages go to one end, so it takes constant time for them.
#pragma once

#include <cstdint>
#include <vector>

#include "kvq/result.h"
#include "kvq/types.h"

namespace kvq {

struct PageLink {
  PageId previous = kNullPage, next = kNullPage;
};
using PageLinks = std::vector<PageLink>;  // by page id; lists that never share a page may share it

class PageList {
 public:
  std::uint32_t size() const { return size_; }
  PageId first() const { return first_; }

  // `stamp(page)` is its last use; equal stamps keep the order of insertion.
  template <typename Stamp>
  void insert(PageLinks& links, PageId page, Stamp stamp) {
    const auto mine = stamp(page);
    PageId after = last_;    // walks backwards to the last page that is not newer
    PageId before = first_;  // walks forwards to the first page that is newer
    while (after != kNullPage && stamp(after) > mine) {
      if (stamp(before) > mine) {
        after = links[raw(before)].previous;
        break;
      }
      before = links[raw(before)].next;
      after = links[raw(after)].previous;
    }
    insert_after(links, after, page);
  }

  void erase(PageLinks& links, PageId page) {
    KVQ_ASSERT(size_ > 0);
    const PageLink link = links[raw(page)];
    (link.previous == kNullPage ? first_ : links[raw(link.previous)].next) = link.next;
    (link.next == kNullPage ? last_ : links[raw(link.next)].previous) = link.previous;
    links[raw(page)] = {};
    --size_;
  }

 private:
  void insert_after(PageLinks& links, PageId after, PageId page) {
    const PageId next = after == kNullPage ? first_ : links[raw(after)].next;
    links[raw(page)] = {after, next};
    (after == kNullPage ? first_ : links[raw(after)].next) = page;
    (next == kNullPage ? last_ : links[raw(next)].previous) = page;
    ++size_;
  }

  PageId first_ = kNullPage, last_ = kNullPage;
  std::uint32_t size_ = 0;
};

}  // namespace kvq

// What becomes of the pages that a reader reads: how often each changes its format or its place, as its own mapped
// directory tells.
//
// Invariant: a lower bound. It is looked at between steps, so what happens to a page twice within one step counts once.
// The pages are held by a sequence, so that none of their ids comes to stand for another page.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "client/abi.h"

namespace kvq::bench {

class PageWatch {
 public:
  // From now on these pages, beside what was counted before.
  void begin(const client::Model& model, const std::vector<std::int32_t>& table) {
    end();
    pages_.clear();
    for (const std::int32_t page : table) {
      const PageId id{static_cast<std::uint32_t>(page)};
      pages_.push_back({id, model.entry(id)});
    }
  }
  void look(const client::Model& model) {
    for (Page& page : pages_) {
      const Entry now = model.entry(page.id);
      if (now.format != page.last.format) {
        ++page.turned;
      } else if (now.offset_bytes != page.last.offset_bytes) {
        ++page.moved;
      }
      page.last = now;
      dense_seen_ += now.format == Format::dense ? 1 : 0;
      ++seen_;
    }
  }

  nlohmann::json json() {
    end();
    pages_.clear();
    return {{"document_pages", total_.pages},
            {"pages_quantized_while_read", total_.turned_pages},
            {"pages_moved_while_read", total_.moved_pages},
            {"page_moves", total_.moves},
            {"most_moves_of_a_page", total_.most_moves},
            {"dense_share", seen_ == 0 ? 0 : static_cast<double>(dense_seen_) / static_cast<double>(seen_)}};
  }
  // Of the measured steps alone.
  void forget() {
    for (Page& page : pages_) page.turned = page.moved = 0;
    total_ = {};
    dense_seen_ = seen_ = 0;
  }

 private:
  struct Page {
    PageId id;
    Entry last;
    std::uint64_t turned = 0, moved = 0;
  };
  struct Total {
    std::uint64_t pages = 0, turned_pages = 0, moved_pages = 0, moves = 0, most_moves = 0;
  };

  void end() {
    for (const Page& page : pages_) {
      ++total_.pages;
      total_.turned_pages += page.turned > 0 ? 1 : 0;
      total_.moved_pages += page.moved > 0 ? 1 : 0;
      total_.moves += page.moved;
      total_.most_moves = std::max(total_.most_moves, page.moved);
    }
  }

  std::vector<Page> pages_;
  Total total_;
  std::uint64_t dense_seen_ = 0, seen_ = 0;
};

}  // namespace kvq::bench

// All that top knows: what kvqd showed lately, and what the keys asked for. It makes frames of that.
//
// Invariant: pure: no clock, no terminal, no daemon. A frame has exactly the size asked for. Rates are of looks at
// one and the same daemon, never across its restart.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "tools/kvqctl/top_table.h"

namespace kvqctl {

// What of a keyboard top knows; characters are themselves.
enum Key : int { kEnter = 10, kEscape = 27, kBackspace = 127, kUp = 1000, kDown, kPageUp, kPageDown, kTab = 9 };

struct Rates {         // a second
  double seconds = 0;  // over how long; 0: not known
  Counters counters;
  std::map<std::string, double> hits;  // pages, by tenant_key
};

class TopModel {
 public:
  TopModel(std::string socket, std::uint64_t interval_ms) : socket_(std::move(socket)), interval_ms_(interval_ms) {}

  void add(const Sample& sample);                           // left out while paused
  void lost(const std::string& why, std::uint64_t now_ms);  // nothing answers
  bool press(int key);                                      // false: quit
  std::uint64_t interval_ms() const { return interval_ms_; }
  Frame frame(std::size_t width, std::size_t height, std::uint64_t now_ms) const;

 private:
  struct Past {  // what the bars show
    std::vector<std::pair<std::string, Use>> devices;
  };

  bool edit_filter(int key);
  void pick_device();
  void scroll(std::ptrdiff_t rows);
  std::size_t rows_wanted() const;
  Rates rates_of_device() const;

  Line title() const;
  Line news(std::uint64_t now_ms) const;
  Frame bars(std::size_t width, std::size_t most) const;
  Line legend() const;
  Frame chart(std::size_t width, std::size_t height) const;
  Frame figures() const;
  Line foot() const;
  Frame help() const;

  const std::string socket_;
  std::uint64_t interval_ms_;
  std::optional<Sample> now_;
  std::deque<Sample> recent_;  // of one daemon, oldest first, `now_` last: what rates are of
  std::deque<Past> past_;      // oldest first
  std::string why_lost_;
  std::uint64_t lost_since_ms_ = 0;
  bool lost_ = false, paused_ = false, filtering_ = false, helping_ = false, restarted_ = false;
  TableWish wish_{.sort_by = 2};
  std::size_t sort_by_[2] = {2, 0};  // of each view: tenants by what they hold, sessions by number
};

}  // namespace kvqctl

// The Prometheus text format: families of samples, written one after the other.
//
// Invariant: a family is written whole before the next begins, its help and type once and first; label values are
// escaped, so that no name can break a line; what was counted in whole numbers is written in whole numbers.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/store_counts.h"

namespace kvq {

using Label = std::pair<std::string_view, std::string_view>;
using Labels = std::vector<Label>;

enum class MetricKind : std::uint8_t { counter, gauge, histogram };

class Exposition {
 public:
  // The samples that follow belong to it.
  void family(std::string_view name, MetricKind kind, std::string_view help);

  void sample(const Labels& labels, std::uint64_t value);
  void sample(const Labels& labels, double value);
  // In seconds, as the text format wants them.
  void sample_ms(const Labels& labels, std::uint64_t ms);
  void sample(const Labels& labels, const TimeHistogram& times);
  void sample(const Labels& labels, const RatioHistogram& ratios);

  std::string take() { return std::move(text_); }

 private:
  // `bound` gives the text of each upper end but the last.
  template <typename Histogram, typename Bound>
  void histogram(const Labels& labels, const Histogram& h, std::string_view sum, Bound bound);
  void line(std::string_view suffix, const Labels& labels, std::string_view value);

  std::string name_, text_;
};

}  // namespace kvq

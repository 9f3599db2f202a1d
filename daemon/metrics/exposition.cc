// Text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats
#include "daemon/metrics/exposition.h"

#include <charconv>

namespace kvq {
namespace {

std::string decimal(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

// Exact: a thousandth has three digits.
std::string seconds(std::uint64_t ms) {
  std::string digits = std::to_string(ms % 1000);
  digits.insert(0, 3 - digits.size(), '0');
  while (!digits.empty() && digits.back() == '0') digits.pop_back();
  return std::to_string(ms / 1000) + (digits.empty() ? "" : "." + digits);
}

std::string escaped(std::string_view value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? std::string_view("\\n") : std::string_view(&c, 1);
  }
  return out;
}

}  // namespace

void Exposition::family(std::string_view name, MetricKind kind, std::string_view help) {
  static constexpr std::string_view kKinds[] = {"counter", "gauge", "histogram"};
  name_ = name;
  text_ += "# HELP " + name_ + " " + std::string(help) + "\n";
  text_ += "# TYPE " + name_ + " " + std::string(kKinds[static_cast<std::size_t>(kind)]) + "\n";
}

void Exposition::line(std::string_view suffix, const Labels& labels, std::string_view value) {
  text_ += name_;
  text_ += suffix;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    text_ += i == 0 ? '{' : ',';
    text_ += std::string(labels[i].first) + "=\"" + escaped(labels[i].second) + "\"";
  }
  if (!labels.empty()) text_ += '}';
  text_ += ' ';
  text_ += value;
  text_ += '\n';
}

void Exposition::sample(const Labels& labels, std::uint64_t value) { line("", labels, std::to_string(value)); }
void Exposition::sample(const Labels& labels, double value) { line("", labels, decimal(value)); }
void Exposition::sample_ms(const Labels& labels, std::uint64_t ms) { line("", labels, seconds(ms)); }

template <typename Histogram, typename Bound>
void Exposition::histogram(const Labels& labels, const Histogram& h, std::string_view sum, Bound bound) {
  std::uint64_t count = 0;
  for (std::size_t i = 0; i < h.buckets.size(); ++i) {
    count += h.buckets[i];
    const std::string end = i + 1 < h.buckets.size() ? bound(i) : "+Inf";
    Labels with = labels;
    with.emplace_back("le", end);
    line("_bucket", with, std::to_string(count));
  }
  line("_sum", labels, sum);
  line("_count", labels, std::to_string(count));
}

void Exposition::sample(const Labels& labels, const TimeHistogram& times) {
  histogram(labels, times, seconds(times.sum_ms), [](std::size_t i) { return seconds(TimeHistogram::kBoundsMs[i]); });
}

void Exposition::sample(const Labels& labels, const RatioHistogram& ratios) {
  histogram(labels, ratios, decimal(ratios.sum), [](std::size_t i) { return decimal(RatioHistogram::kBounds[i]); });
}

}  // namespace kvq

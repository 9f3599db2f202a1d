// Powers of 1024, one digit behind the point where it says something.
#include "tools/kvqctl/text.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

namespace kvqctl {

std::string format_double(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string bytes_text(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  std::size_t unit = 0;
  for (; bytes >= 1023.5 && unit + 1 < std::size(kUnits); ++unit) bytes /= 1024;
  return format_double(unit > 0 && bytes < 99.95 ? "%.1f " : "%.0f ", bytes) + kUnits[unit];
}

std::string percent(double share) { return format_double("%.0f %%", share * 100); }

std::string duration(std::uint64_t ms) {
  const std::uint64_t s = ms / 1000;
  if (s < 60) return format_double("%.1f s", static_cast<double>(ms / 100) / 10);
  if (s < 3600) return std::to_string(s / 60) + " min " + std::to_string(s % 60) + " s";
  if (s < 86400) return std::to_string(s / 3600) + " h " + std::to_string(s % 3600 / 60) + " min";
  return std::to_string(s / 86400) + " d " + std::to_string(s % 86400 / 3600) + " h";
}

std::string rate_text(double per_second) {
  if (per_second <= 0) return "0";
  return format_double(per_second < 9.95 ? "%.1f" : "%.0f", per_second);
}

std::string ascii(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c < ' ' || c > '~') c = '?';
  }
  return out;
}

std::string fit(std::string text, std::size_t width) {
  text.resize(width, ' ');
  return text;
}

std::string table(const std::vector<Row>& rows, const std::vector<std::size_t>& left) {
  std::vector<std::size_t> width(rows.front().size());
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string out;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string pad(width[i] - row[i].size(), ' ');
      const bool is_left = std::find(left.begin(), left.end(), i) != left.end();
      line += (i == 0 ? "" : "  ") + (is_left ? row[i] + pad : pad + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

std::optional<std::uint64_t> size_of(const std::string& text) {
  std::uint64_t number = 0;
  const char* const end_of_text = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), end_of_text, number);
  if (error != std::errc()) return std::nullopt;
  const std::string unit(end, end_of_text);
  constexpr std::pair<const char*, unsigned> kUnits[] = {{"", 0},     {"B", 0},    {"KiB", 10},
                                                         {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  for (const auto& [name, shift] : kUnits) {
    if (unit == name && number <= UINT64_MAX >> shift) return number << shift;
  }
  return std::nullopt;
}

}  // namespace kvqctl

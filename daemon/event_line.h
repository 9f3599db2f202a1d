// One event is one line of words key=value; a value with spaces stands in quotes, and none has a quote inside.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvq {

// The words in their order, values without their quotes. What is no word ends the line.
inline std::vector<std::pair<std::string, std::string>> event_fields(std::string_view line) {
  std::vector<std::pair<std::string, std::string>> out;
  std::size_t at = 0;
  while (at < line.size()) {
    const std::size_t equals = line.find('=', at);
    if (equals == std::string_view::npos) break;
    const bool quoted = equals + 1 < line.size() && line[equals + 1] == '"';
    const std::size_t begin = std::min(equals + (quoted ? 2 : 1), line.size());
    const std::size_t end = std::min(line.find(quoted ? '"' : ' ', begin), line.size());
    out.emplace_back(line.substr(at, equals - at), line.substr(begin, end - begin));
    at = std::min(end + (quoted ? 2 : 1), line.size());
  }
  return out;
}

}  // namespace kvq

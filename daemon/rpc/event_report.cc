// What a reader has not seen yet.
#include "daemon/rpc/event_report.h"

#include <algorithm>

namespace kvq {

using Json = nlohmann::ordered_json;

Json report_events(const EventRing& ring, std::uint64_t after, std::size_t limit, std::uint64_t now_ms) {
  const std::uint64_t wanted = ring.last() - std::min(after, ring.last());
  const std::deque<Event>& all = ring.events();
  const std::size_t count = std::min<std::uint64_t>({wanted, limit, all.size()});
  Json list = Json::array();
  for (std::size_t i = all.size() - count; i < all.size(); ++i) {
    const Event& e = all[i];
    list.push_back({{"number", e.number}, {"age_ms", now_ms - std::min(now_ms, e.at_ms)}, {"line", e.line}});
    list.back()["fields"] = fields_of(e.line);
  }
  return {{"next", ring.last()}, {"missed", wanted - count}, {"events", list}};
}

Json fields_of(const std::string& line) {
  Json out = Json::object();
  std::size_t at = 0;
  while (at < line.size()) {
    const std::size_t equals = line.find('=', at);
    if (equals == std::string::npos) break;
    const bool quoted = equals + 1 < line.size() && line[equals + 1] == '"';
    const std::size_t begin = equals + (quoted ? 2 : 1);
    const std::size_t end = std::min(line.find(quoted ? '"' : ' ', begin), line.size());
    out[line.substr(at, equals - at)] = line.substr(std::min(begin, line.size()), end - std::min(begin, end));
    at = std::min(end + (quoted ? 2 : 1), line.size());
  }
  return out;
}

}  // namespace kvq

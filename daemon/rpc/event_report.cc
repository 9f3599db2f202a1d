// What a reader has not seen yet.
#include "daemon/rpc/event_report.h"

#include <algorithm>

#include "daemon/event_line.h"

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
  for (auto& [key, value] : event_fields(line)) out[key] = std::move(value);
  return out;
}

}  // namespace kvq

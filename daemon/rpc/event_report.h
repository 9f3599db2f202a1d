// The ring of events as a document.
//
// Invariant: pure. A reader is told ages, since the daemon knows no wall clock.
#pragma once

#include <nlohmann/json.hpp>

#include "daemon/rpc/event_ring.h"

namespace kvq {

// {"next", "missed", "events": [...]}: the newest `limit` of those with a number above `after`; `next` is what to ask
// after then, `missed` how many above `after` are not there.
nlohmann::ordered_json report_events(const EventRing& ring, std::uint64_t after, std::size_t limit,
                                     std::uint64_t now_ms);
// Of a line of key=value words; a value in quotes may have spaces.
nlohmann::ordered_json fields_of(const std::string& line);

}  // namespace kvq

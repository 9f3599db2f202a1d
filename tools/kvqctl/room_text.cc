// What the verbs that make room say.
#include "tools/kvqctl/cells.h"
#include "tools/kvqctl/tables.h"

namespace kvqctl {
namespace {

std::string resized(const Json& r, bool dry) {
  const auto over = r.at("slabs_over").get<std::uint64_t>();
  return (dry ? "would resize the arena of " : "resized the arena of ") + r.at("device").get<std::string>() + " from " +
         bytes_of(r.at("arena_bytes_before")) + " to " + bytes_of(r.at("arena_bytes")) + ": " +
         r.at("slabs_used").dump() + " slabs are in use" +
         (over == 0 ? "" : ", and " + std::to_string(over) + " of them go as they become free") + "\n";
}

}  // namespace

std::string show_evict_cached(const Json& r) {
  const bool dry = r.at("dry_run").get<bool>();
  return std::string(dry ? "would drop " : "dropping ") + r.at("pages").dump() +
         " cached pages: " + bytes_of(r.at("bytes")) + "\n";
}

std::string show_compact(const Json& r) {
  const bool dry = r.at("dry_run").get<bool>();
  return std::string(dry ? "would move " : "moving ") + r.at("pages").dump() + " pages (" + bytes_of(r.at("bytes")) +
         "), which empties " + r.at("slabs").dump() + " slabs\n";
}

std::string show_resize(const Json& r) {
  const bool dry = r.at("dry_run").get<bool>();
  if (!r.contains("devices")) return resized(r, dry);
  std::string out;
  for (const Json& device : r.at("devices")) out += resized(device, dry);
  return out;
}

}  // namespace kvqctl

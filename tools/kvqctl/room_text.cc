// What the verbs that make room say.
#include "tools/kvqctl/tables.h"
#include "tools/kvqctl/text.h"

namespace kvqctl {
namespace {

std::string bytes_of(const Json& bytes) { return bytes_text(bytes.get<double>()); }

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

}  // namespace kvqctl

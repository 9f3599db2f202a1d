// What the cache holds: sequences, and chains of the prefix index.
#include "tools/kvqctl/content_tables.h"

#include "tools/kvqctl/cells.h"

namespace kvqctl {

std::string show_sequences(const Json& document) {
  const Json& sequences = document.at("sequences");
  if (sequences.empty()) return "no sequences\n";
  std::vector<Row> rows = {{"SESSION", "TENANT", "SEQUENCE", "STATE", "PAGES", "TOKENS", "DENSE", "QUANTIZED", "HOLDS",
                            "SHARED", "LOST", "IDLE"}};
  for (const Json& s : sequences) {
    const DenseAndCold pages = dense_and_cold(s.at("formats"), "pages"),
                       bytes = dense_and_cold(s.at("formats"), "bytes");
    rows.push_back({number(s.at("session")), s.at("tenant"), number(s.at("sequence")), s.at("state"),
                    number(s.at("pages")), number(s.at("tokens")), std::to_string(pages.dense),
                    std::to_string(pages.cold), bytes_text(static_cast<double>(bytes.dense + bytes.cold)),
                    number(s.at("shared_pages")), number(s.at("lost_pages")), duration(s.at("idle_ms"))});
  }
  std::vector<std::size_t> left = {1, 3};
  add_devices(rows, sequences, 1, left);
  std::string out = table(rows, left);
  if (sequences.size() < document.at("total").get<std::size_t>()) {
    out += "(the longest " + std::to_string(sequences.size()) + " of " + number(document.at("total")) +
           "; more with --limit)\n";
  }
  return out;
}

std::string show_prefix(const Json& document) {
  const Json& tenants = document.at("tenants");
  if (tenants.empty()) return "no tenants\n";
  std::vector<Row> rows = {{"TENANT", "INDEXED", "OF", "DENSE", "QUANTIZED", "TOKENS", "NOT HELD", "ATTACHES", "MET",
                            "HIT TOKENS", "COMPUTED", "HIT RATE"}};
  for (const Json& t : tenants) {
    const DenseAndCold pages = dense_and_cold(t.at("formats"), "pages"),
                       tokens = dense_and_cold(t.at("formats"), "tokens");
    rows.push_back({t.at("tenant"), number(t.at("entries")), number(t.at("capacity")), std::to_string(pages.dense),
                    std::to_string(pages.cold), std::to_string(tokens.dense + tokens.cold),
                    number(t.at("cached_pages")), number(t.at("attaches")), number(t.at("attaches_met")),
                    number(t.at("hit_tokens")), number(t.at("computed_tokens")),
                    percent(t.at("hit_rate").get<double>())});
  }
  std::vector<std::size_t> left = {0};
  add_devices(rows, tenants, 1, left);
  std::string out = table(rows, left) + "\n";
  const Json& chains = document.at("chains");
  if (chains.empty()) return out + "no chain is cached\n";
  rows = {{"TENANT", "LEAF", "PAGES", "TOKENS", "DENSE", "QUANTIZED", "HOLDS", "SEQUENCES", "IDLE"}};
  for (const Json& c : chains) {
    const DenseAndCold pages = dense_and_cold(c.at("formats"), "pages"),
                       bytes = dense_and_cold(c.at("formats"), "bytes");
    rows.push_back({c.at("tenant"), number(c.at("page")), number(c.at("pages")), number(c.at("tokens")),
                    std::to_string(pages.dense), std::to_string(pages.cold),
                    bytes_text(static_cast<double>(bytes.dense + bytes.cold)), number(c.at("sequences")),
                    duration(c.at("idle_ms"))});
  }
  left = {0};
  add_devices(rows, chains, 1, left);
  out += table(rows, left);
  if (chains.size() >= document.at("limit").get<std::size_t>()) {
    out += "(the " + std::to_string(chains.size()) + " longest unused; more with --limit)\n";
  }
  if (!document.at("complete").get<bool>()) out += "(not all: one call looks at a bounded number of pages)\n";
  return out;
}

}  // namespace kvqctl

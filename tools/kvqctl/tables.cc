// Aligned tables, sizes in powers of 1024, shares in percent.
#include "tools/kvqctl/tables.h"

#include <algorithm>
#include <ctime>
#include <vector>

#include "tools/kvqctl/cells.h"
#include "tools/kvqctl/text.h"

namespace kvqctl {
namespace {

// The setting of that name when it was changed live, else null.
Json changed_setting(const Json& settings, const std::string& key) {
  for (const Json& setting : settings) {
    if (setting.at("key") == key && setting.at("live").get<bool>()) return setting;
  }
  return nullptr;
}

std::string mark_of(const Json& settings, const std::string& key) {
  return changed_setting(settings, key).is_null() ? "" : "*";
}

// `settings`: those of the document status, or none.
std::string tenants_table(const Json& tenants, const Json& settings = Json::array()) {
  if (tenants.empty()) return "no tenants\n";
  std::vector<Row> rows = {{"TENANT", "LEVEL", "SESSIONS", "HOLDS", "QUOTA", "USED", "SHARE", "DENSE", "INT4", "PAGES",
                            "CACHED", "LIMBO", "FREE"}};
  for (const Json& t : tenants) {
    const DenseAndCold bytes = dense_and_cold(t.at("formats"), "bytes"),
                       pages = dense_and_cold(t.at("formats"), "pages");
    const bool whole = t.at("quota_bytes") == 0;
    const std::string name = t.at("name");
    rows.push_back({t.at("name"), t.at("level"), number(t.at("sessions")), bytes_of(t.at("slab_bytes")),
                    (whole ? "all" : bytes_of(t.at("quota_bytes"))) + mark_of(settings, "quota." + name),
                    whole ? "-" : part_of(t.at("slab_bytes"), t.at("quota_bytes")),
                    number(t.at("share")) + mark_of(settings, "share." + name), bytes_of(bytes.dense),
                    bytes_of(bytes.cold), std::to_string(pages.dense + pages.cold), number(t.at("cached_pages")),
                    bytes_of(t.at("limbo_bytes")), bytes_of(t.at("free_bytes"))});
  }
  std::vector<std::size_t> left = {0, 1};
  add_devices(rows, tenants, 1, left);
  return table(rows, left);
}

// How far the running pass is, or what the last one found.
std::string verify_line(const Json& v) {
  const std::string bad = number(v.at("pages_bad")) + " bad";
  if (v.at("running").get<bool>()) {
    return number(v.at("pages_done")) + " of " + number(v.at("pages_total")) + " pages compared (" +
           part_of(v.at("pages_done"), v.at("pages_total")) + "), " + bad;
  }
  const std::string ever = number(v.at("pages_bad_ever")) + " bad since start";
  if (v.at("passes") == 0) return "not yet, " + ever;
  return "last pass: " + number(v.at("pages_done")) + " pages, " + bad + "; " + ever;
}

std::string adopt_line(const Json& a) {
  const std::string refused = a.at("refused");
  if (!refused.empty()) return "refused, started clean: " + refused;
  if (!a.at("adopted").get<bool>()) return "nothing was left";
  return number(a.at("sessions")) + " sessions, " + number(a.at("sequences")) + " sequences, " + number(a.at("pages")) +
         " pages in " + number(a.at("slabs")) + " slabs; " + number(a.at("undone_bytes")) + " bytes undone";
}

// A device without a worker has nothing to be unwell.
std::string device_line(const Json& s) {
  const Json& health = s.at("device_health");
  const std::string uuid = health.at("uuid"), text = health.at("text");
  std::string out = s.at("device").get<std::string>();
  if (!uuid.empty()) out += " " + uuid + " (" + health.at("export").get<std::string>() + ")";
  out += health.at("state") == "ok" ? ", ok" : ", DEGRADED: " + text;
  if (uuid.empty()) return out;
  return out + "; " + number(health.at("worker_restarts")) + " worker restarts; holds " +
         bytes_of(health.at("held_bytes")) + " and " + bytes_of(health.at("overhead_bytes")) + " for its worker";
}

std::string watermarks_line(const Json& marks, const Json& settings) {
  std::string out;
  for (const auto& [key, text] : {std::pair("quantize_at", "quantize at "), std::pair("evict_at", ", evict at "),
                                  std::pair("refuse_at", ", refuse at "), std::pair("relief", ", relief ")}) {
    out += text + percent(marks.at(key)) + mark_of(settings, key);
  }
  return out;
}

// What a `*` in the tables means: which settings were changed live, and what the configuration says.
std::string live_lines(const Json& settings) {
  std::string out;
  for (const Json& s : settings) {
    if (!s.at("live").get<bool>()) continue;
    const std::string key = s.at("key");
    const auto shown = [&](const Json& value) {
      if (key.rfind("quota.", 0) != 0) return value.dump();
      return value == 0 ? std::string("the arena") : bytes_of(value);
    };
    out += "* " + key + " is " + shown(s.at("value")) +
           " until kvqd restarts or reloads; configured: " + shown(s.at("configured")) + "\n";
  }
  return out.empty() ? out : "\n" + out;
}

// Empty unless slabs above the arena's new size are in use.
std::string shrinking(const Json& arena) {
  if (arena.at("slabs_over") == 0) return "";
  return "; shrinking to " + bytes_of(arena.at("target_bytes")) + ", " + number(arena.at("slabs_over")) +
         " slabs to go";
}

std::vector<Row> device_rows(const Json& s, const Json& settings) {
  const Json& arena = s.at("arena");
  const Json& transcodes = s.at("transcodes");
  const std::string draining = s.at("draining").get<bool>() ? ", draining" : "";
  return {
      {"device", device_line(s)},
      {"pressure", s.at("level").get<std::string>() + draining},
      {"arena", bytes_of(arena.at("bytes")) + " in slabs of " + bytes_of(arena.at("slab_bytes")) + ": " +
                    number(arena.at("slabs_used")) + " used (" + part_of(arena.at("slabs_used"), arena.at("slabs")) +
                    "), " + number(arena.at("slabs_free")) + " free, " + number(arena.at("slabs_reserved")) +
                    " of these for transcodes only" + shrinking(arena)},
      {"watermarks", watermarks_line(s.at("watermarks"), settings)},
      {"transcodes", number(transcodes.at("done")) + " done (" + bytes_of(transcodes.at("bytes")) + "), " +
                         number(transcodes.at("failed")) + " failed, " + number(transcodes.at("in_flight")) +
                         " in flight"},
      {"pages", number(s.at("dropped_pages")) + " dropped, " + number(s.at("limbo_slots")) + " slots in limbo"},
      {"requests", number(s.at("parked_requests")) + " waiting for room, " + number(s.at("refusals")) + " refused"},
      {"verified", verify_line(s.at("verify"))},
      {"adopted", adopt_line(s.at("adopt"))}};
}

}  // namespace

std::string state_of(const Json& session) {
  if (session.at("evicted").get<bool>()) return "evicted";
  if (session.at("waits_for_client").get<bool>()) return "waiting";
  if (!session.at("connected").get<bool>()) return "leaving";
  return session.at("ready").get<bool>() ? "connected" : "mapping";
}

std::string show_status(const Json& s) {
  const std::string kvqd =
      s.at("version").get<std::string>() + ", pid " + number(s.at("pid")) + ", up " + duration(s.at("uptime_ms"));
  std::vector<Row> head = {{"kvqd", kvqd}};
  const std::string file = s.at("config_file");
  head.push_back({"configuration", file.empty() ? "no file" : file});
  const Json& settings = s.at("settings");
  for (const Json& absent : s.at("not_served")) {
    head.push_back({"not served", "DEGRADED: " + absent.at("text").get<std::string>()});
  }
  if (!s.contains("devices")) {
    std::vector<Row> rows = device_rows(s, settings);
    rows.insert(rows.begin(), head.begin(), head.end());
    rows.push_back({"sessions", number(s.at("sessions")) + " on " + number(s.at("connections")) + " connections"});
    return table(rows, {0, 1}) + "\n" + tenants_table(s.at("tenants"), settings) + live_lines(settings);
  }
  head.push_back({"sessions", number(s.at("sessions")) + " on " + number(s.at("devices").size()) + " devices, by " +
                                  number(s.at("connections")) + " connections"});
  std::string out = table(head, {0, 1});
  for (const Json& device : s.at("devices")) {
    std::vector<Row> rows = device_rows(device, settings);
    rows.push_back({"sessions", number(device.at("sessions"))});
    out += "\n" + table(rows, {0, 1}) + "\n" + tenants_table(device.at("tenants"), settings);
  }
  return out + live_lines(settings);
}

std::string show_sessions(const Json& document) {
  const Json& sessions = document.at("sessions");
  if (sessions.empty()) return "no sessions\n";
  std::vector<Row> rows = {{"", "SESSION", "TENANT", "PID", "LABEL", "STATE", "OLDEST STEP", "HOLDS BACK", "STEPS",
                            "LAG", "SEQUENCES", "RUNNING", "PAGES", "LOST", "CREDITS", "REFUSED"}};
  std::string hung;
  for (const Json& s : sessions) {
    if (s.at("hung").get<bool>()) hung += (hung.empty() ? "" : ", ") + number(s.at("id"));
    const auto step_ms = s.at("oldest_step_ms").get<std::uint64_t>();
    rows.push_back({s.at("hung").get<bool>() ? "!" : "", number(s.at("id")), s.at("tenant"), number(s.at("pid")),
                    s.at("label"), state_of(s), s.at("open_steps") == 0 ? "-" : std::to_string(step_ms) + " ms",
                    bytes_of(s.at("limbo_bytes")), number(s.at("open_steps")), number(s.at("oldest_step_epochs")),
                    number(s.at("sequences")), number(s.at("running")), number(s.at("pages")),
                    number(s.at("lost_pages")), number(s.at("credits")) + "/" + number(s.at("credits_target")),
                    number(s.at("commands_refused"))});
  }
  std::vector<std::size_t> left = {0, 2, 4, 5};
  add_devices(rows, sessions, 2, left);
  std::string out = table(rows, left);
  if (!hung.empty()) {
    out += "! hung: a step is open for longer than " + duration(document.at("step_deadline_ms")) +
           ", so it gets no new pages; kvqctl evict-session ends it (" + hung + ")\n";
  }
  return out;
}

std::string show_tenants(const Json& document) { return tenants_table(document.at("tenants")); }

std::string show_pages(const Json& document) {
  const Json& pages = document.at("pages");
  if (pages.empty()) return "no pages\n";
  std::vector<Row> rows = {
      {"TENANT", "PAGE", "GEN", "FORMAT", "STATE", "SLAB", "SLOT", "HELD", "IDLE", "CACHED", "STAYS DENSE"}};
  for (const Json& p : pages) {
    rows.push_back({p.at("tenant"), number(p.at("page")), number(p.at("generation")), p.at("format"), p.at("state"),
                    number(p.at("slab")), number(p.at("slot")), number(p.at("references")), duration(p.at("idle_ms")),
                    p.at("indexed").get<bool>() ? "yes" : "no", p.at("stays_dense")});
  }
  std::vector<std::size_t> left = {0, 3, 4, 10};
  add_devices(rows, pages, 0, left);
  std::string out = table(rows, left);
  if (pages.size() >= document.at("limit").get<std::size_t>()) {
    out += "(the first " + std::to_string(pages.size()) + "; more with --limit)\n";
  }
  return out;
}

std::string show_quantize(const Json& r) {
  const bool dry = r.at("dry_run").get<bool>();
  return std::string(dry ? "would quantize " : "quantizing ") + number(r.at("pages")) +
         " pages: " + bytes_of(r.at("bytes_before")) + " -> " + bytes_of(r.at("bytes_after")) + "\n";
}

std::string show_set(const Json& changed) {
  std::string out;
  if (changed.at("dry_run").get<bool>()) out += "nothing is changed; it would be:\n";
  for (const auto& [key, value] : changed.items()) {
    if (key == "dry_run" || key == "saved") continue;
    out += key + " = " +
           (value.is_string()      ? value.get<std::string>()
            : key == "quota_bytes" ? bytes_of(value)
                                   : value.dump()) +
           "\n";
  }
  if (!changed.contains("saved")) return out;
  const std::string line = changed.at("saved").at("line"), file = changed.at("saved").at("file");
  return out + (line.empty() ? file + " says that already\n" : "in " + file + ": " + line + "\n");
}

std::string show_drain(const Json& r) {
  if (r.value("dry_run", false)) return "would wait for " + number(r.at("sessions_left")) + " sessions, and end kvqd\n";
  const auto left = r.at("sessions_left").get<std::uint64_t>();
  return left == 0 ? "drained: no session is left, kvqd ends\n"
                   : "the deadline passed with " + std::to_string(left) + " sessions left; kvqd ends\n";
}

std::string show_evict(const Json& r) {
  if (r.value("dry_run", false)) {
    return "would evict session " + number(r.at("session")) + " of process " + number(r.at("pid")) + ", which holds " +
           number(r.at("pages")) + " pages in " + number(r.at("sequences")) + " sequences" +
           (r.at("killed").get<bool>() ? ", and kill the process\n" : "\n");
  }
  return "session " + number(r.at("session")) + " of process " + number(r.at("pid")) + " is evicted" +
         (r.at("killed").get<bool>() ? " and its process killed\n" : "\n");
}

std::string show_verify(const Json& r) {
  return std::string(r.at("finished").get<bool>() ? "verified " : "verified so far ") + number(r.at("pages")) + " of " +
         number(r.at("pages_total")) + " pages: " + number(r.at("bad")) + " bad\n";
}

std::string time_text(std::int64_t ms) {
  const std::time_t seconds = ms / 1000;
  std::tm parts{};
  ::localtime_r(&seconds, &parts);
  char day[32], zone[8];
  std::strftime(day, sizeof(day), "%Y-%m-%dT%H:%M:%S", &parts);
  std::strftime(zone, sizeof(zone), "%z", &parts);
  return day + format_double(".%03.0f", static_cast<double>(ms % 1000)) + zone;
}

std::string show_events(const Json& document, std::int64_t now_ms) {
  std::string out;
  for (const Json& e : document.at("events")) {
    out += time_text(now_ms - e.at("age_ms").get<std::int64_t>()) + " " + ascii(e.at("line").get<std::string>()) + "\n";
  }
  return out;
}

}  // namespace kvqctl

// Ask, print; again where that is wished.
#include "tools/kvqctl/verbs.h"

#include <unistd.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <thread>

#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/content_tables.h"
#include "tools/kvqctl/doctor.h"
#include "tools/kvqctl/exec_bench.h"
#include "tools/kvqctl/save.h"
#include "tools/kvqctl/tables.h"
#include "tools/kvqctl/text.h"
#include "tools/kvqctl/top.h"

namespace kvqctl {
namespace {

constexpr std::uint64_t kFollowMs = 500;
constexpr std::uint32_t kAllEvents = 1000;

void print(const Options& o, const std::string& document, std::string (*show)(const Json&)) {
  const Json parsed = Json::parse(document);
  std::cout << (o.json ? parsed.dump(2) + "\n" : show(parsed)) << std::flush;
}

// Once, or every --watch seconds until the daemon or the reader is gone.
void watch(const Options& o, AdminClient& admin, const std::function<std::string()>& ask,
           std::string (*show)(const Json&)) {
  for (;;) {
    const std::string document = ask();
    if (o.watch_s > 0 && !o.json && ::isatty(STDOUT_FILENO) != 0) std::cout << "\033[H\033[2J";
    print(o, document, show);
    if (o.watch_s == 0 || !std::cout) return;
    admin.sleep_ms(static_cast<std::uint64_t>(o.watch_s * 1000));
  }
}

// Bad pages, or a pass that did not end in time, are no success.
void verify(const Options& o, AdminClient& admin) {
  const std::string document = admin.verify(o.tenant, o.deadline_ms);
  print(o, document, show_verify);
  const Json report = Json::parse(document);
  const auto bad = report.at("bad").get<std::uint64_t>();
  if (bad > 0) {
    throw Failure(kBadPages, std::to_string(bad) + " pages are bad; kvqctl sessions shows in LOST who held them");
  }
  if (!report.at("finished").get<bool>()) {
    throw Failure(kRefused, "not finished within " + std::to_string(o.deadline_ms) +
                                " ms; it goes on, kvqctl status shows how far it is");
  }
}

// Without a change: the session as `kvqctl sessions` has it.
void evict_session(const Options& o, AdminClient& admin) {
  if (!o.dry_run) return print(o, admin.evict_session(o.session, o.kill), show_evict);
  const Json document = Json::parse(admin.sessions());
  for (const Json& s : document.at("sessions")) {
    if (s.at("id") != o.session) continue;
    const Json report = {{"dry_run", true},  {"session", o.session},   {"pid", s.at("pid")},
                         {"killed", o.kill}, {"pages", s.at("pages")}, {"sequences", s.at("sequences")}};
    return print(o, report.dump(), show_evict);
  }
  throw Failure(kRefused, "there is no session " + std::to_string(o.session) + "; kvqctl sessions lists them");
}

// The change is made first, so that it holds whatever becomes of the file.
void set(const Options& o, AdminClient& admin) {
  Json report = Json::parse(admin.set(o.key, o.value, o.dry_run));
  if (!o.save) return print(o, report.dump(), show_set);
  try {
    const Saved saved = save_setting(Json::parse(admin.status()), o.key, o.value, o.dry_run);
    report["saved"] = {{"file", saved.file}, {"line", saved.line}};
    if (!o.dry_run) admin.set(o.key, o.value, false, true);  // so that kvqd shows it as configured
  } catch (const Failure& failure) {
    throw Failure(failure.exit_code,
                  std::string(failure.what()) +
                      (o.dry_run ? "" : "; " + o.key + " = " + o.value + " holds until kvqd restarts or reloads"));
  }
  print(o, report.dump(), show_set);
}

void resize(const Options& o, AdminClient& admin) {
  const auto bytes = size_of(o.size);
  if (!bytes) throw Failure(kUsage, "SIZE = " + o.size + " is no size; write it as 8GiB or 512MiB");
  print(o, admin.resize(*bytes, o.device, o.dry_run), show_resize);
}

void drain(const Options& o, AdminClient& admin) {
  if (!o.dry_run) return print(o, admin.drain(static_cast<std::uint32_t>(o.deadline_s * 1000)), show_drain);
  const Json report = {{"dry_run", true}, {"sessions_left", Json::parse(admin.status()).at("sessions")}};
  print(o, report.dump(), show_drain);
}

std::int64_t wall_clock_ms() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

// Of a document of events: each one a line, so that the stream can be read as it comes.
void print_events(const Options& o, const Json& document) {
  const std::int64_t now_ms = wall_clock_ms();
  if (!o.json) {
    std::cout << show_events(document, now_ms) << std::flush;
    return;
  }
  for (Json event : document.at("events")) {
    event["time"] = time_text(now_ms - event.at("age_ms").get<std::int64_t>());
    std::cout << event.dump() << "\n";
  }
  std::cout << std::flush;
}

// A kvqd that is gone is waited for, and a new one's events are taken from its first on.
void events(const Options& o) {
  std::uint64_t after = 0, pid = 0;
  std::unique_ptr<AdminClient> admin;
  bool first = true, told = false;
  do {
    try {
      if (admin == nullptr) admin = std::make_unique<AdminClient>(socket_of(o));
      Json document = Json::parse(admin->events(after, first ? o.limit : kAllEvents));
      const auto now = document.at("pid").get<std::uint64_t>();
      if (!first && now != pid && after != 0) document = Json::parse(admin->events(0, kAllEvents));
      const auto missed = document.at("missed").get<std::uint64_t>();
      if (!first && missed > 0) std::cerr << "kvqctl: " << missed << " events came too fast and are not shown\n";
      print_events(o, document);
      pid = now;
      after = document.at("next").get<std::uint64_t>();
      first = told = false;
    } catch (const Failure& failure) {
      admin = nullptr;
      if (!o.follow || failure.exit_code != kNoDaemon || (first && after == 0)) throw;
      if (!told) std::cerr << "kvqctl: waiting for kvqd: " << failure.what() << "\n";
      told = true;
    }
    if (o.follow) std::this_thread::sleep_for(std::chrono::milliseconds(kFollowMs));
  } while (o.follow && std::cout);
}

}  // namespace

void run_verb(const std::string& verb, const Options& o) {
  if (verb == "top") return top({socket_of(o), o.interval_s, !o.no_color});
  if (verb == "events") return events(o);
  if (verb == "doctor") return doctor(o);
  if (verb == "bench") exec_bench(o);
  AdminClient admin(socket_of(o));
  if (verb == "status")
    return watch(
        o, admin, [&] { return admin.status(); }, show_status);
  if (verb == "sessions")
    return watch(
        o, admin, [&] { return admin.sessions(); }, show_sessions);
  if (verb == "tenants")
    return watch(
        o, admin, [&] { return admin.tenants(); }, show_tenants);
  if (verb == "pages")
    return watch(
        o, admin, [&] { return admin.pages(o.tenant, o.device, o.limit); }, show_pages);
  if (verb == "sequences")
    return watch(
        o, admin, [&] { return admin.sequences(o.tenant, o.session, o.device, o.limit); }, show_sequences);
  if (verb == "prefix")
    return watch(
        o, admin, [&] { return admin.prefix(o.tenant, o.device, o.limit); }, show_prefix);
  if (verb == "quantize") return print(o, admin.quantize(o.tenant, o.idle_ms, o.dry_run), show_quantize);
  if (verb == "evict") return print(o, admin.evict(o.tenant, o.idle_ms, o.dry_run), show_evict_cached);
  if (verb == "compact") return print(o, admin.compact(o.tenant, o.dry_run), show_compact);
  if (verb == "resize") return resize(o, admin);
  if (verb == "set") return set(o, admin);
  if (verb == "evict-session") return evict_session(o, admin);
  if (verb == "verify") return verify(o, admin);
  drain(o, admin);
}

}  // namespace kvqctl

// kvqctl: shows and tunes a running kvqd. Thin: the daemon decides and reports, this formats.
//
// Exit codes: 0 done, 1 the daemon says no, 2 bad command line, 3 no daemon, 4 verify found bad pages. Errors are one
// line on stderr.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>

#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/tables.h"
#include "tools/kvqctl/top.h"

namespace kvqctl {
namespace {

constexpr char kDefaultSocket[] = "/run/kvq/kvqd.sock";

struct Options {
  std::string socket;
  bool json = false;
  double watch_s = 0;
  double interval_s = 1;
  bool no_color = false;
  std::string tenant, device;
  std::uint32_t limit = 100;
  std::uint64_t idle_ms = 0;
  bool dry_run = false;
  std::string key, value;
  double deadline_s = 60;
  std::uint32_t session = 0;
  bool kill = false;
  std::uint32_t deadline_ms = 60'000;
};

void print(const Options& o, const std::string& document, std::string (*show)(const Json&)) {
  const Json parsed = Json::parse(document);
  std::cout << (o.json ? parsed.dump(2) + "\n" : show(parsed)) << std::flush;
}

void watch_status(const Options& o, AdminClient& admin) {
  for (;;) {
    const std::string document = admin.status();
    if (!o.json) std::cout << "\033[H\033[2J";
    print(o, document, show_status);
    if (o.watch_s == 0 || !std::cout) return;
    admin.sleep_ms(static_cast<std::uint64_t>(o.watch_s * 1000));
  }
}

void show_once(const Options& o, AdminClient& admin) { print(o, admin.status(), show_status); }

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

// What each verb does with a connection.
void run_verb(const std::string& verb, const Options& o, AdminClient& admin) {
  if (verb == "status") return o.watch_s > 0 ? watch_status(o, admin) : show_once(o, admin);
  if (verb == "sessions") return print(o, admin.sessions(), show_sessions);
  if (verb == "tenants") return print(o, admin.tenants(), show_tenants);
  if (verb == "pages") return print(o, admin.pages(o.tenant, o.device, o.limit), show_pages);
  if (verb == "quantize") return print(o, admin.quantize(o.tenant, o.idle_ms, o.dry_run), show_quantize);
  if (verb == "set") return print(o, admin.set(o.key, o.value), show_set);
  if (verb == "evict-session") return print(o, admin.evict_session(o.session, o.kill), show_evict);
  if (verb == "verify") return verify(o, admin);
  print(o, admin.drain(static_cast<std::uint32_t>(o.deadline_s * 1000)), show_drain);
}

void add_verbs(CLI::App& app, Options& o) {
  app.require_subcommand(0, 1);  // a wrong verb is named only when none is required
  app.add_option("--socket", o.socket, "kvqd's socket (else KVQ_SOCKET, else " + std::string(kDefaultSocket) + ")");
  auto* status = app.add_subcommand("status", "the daemon, its arena and its tenants");
  status->add_option("--watch", o.watch_s, "show again every SECONDS")->check(CLI::Range(0.1, 3600.0));
  auto* top = app.add_subcommand("top", "a full-screen live view; ? shows its keys");
  top->add_option("--interval", o.interval_s, "look every SECONDS")
      ->check(CLI::Range(0.25, 60.0))
      ->capture_default_str();
  top->add_flag("--no-color", o.no_color, "no colours; so does the variable NO_COLOR");
  top->fallthrough();
  auto* sessions = app.add_subcommand("sessions", "model servers: what each holds, and which one hangs");
  auto* tenants = app.add_subcommand("tenants", "memory by tenant");
  auto* pages = app.add_subcommand("pages", "single pages");
  pages->add_option("--limit", o.limit, "at most so many")->check(CLI::Range(1, 10'000))->capture_default_str();
  pages->add_option("--device", o.device, "on this device only: a GPU's UUID as kvqctl status names it, or host");
  auto* quantize = app.add_subcommand("quantize", "quantize dense pages that nobody used lately");
  quantize->add_option("--idle", o.idle_ms, "unused for at least so many ms")->capture_default_str();
  quantize->add_flag("--dry-run", o.dry_run, "only say what it would do");
  auto* evict = app.add_subcommand("evict-session", "end a session, whatever its process does");
  evict->add_option("session", o.session, "its number in kvqctl sessions")->required();
  evict->add_flag("--kill", o.kill, "kill its process, too");
  auto* verify = app.add_subcommand("verify", "compare every sealed page with its checksum");
  verify->add_option("--deadline-ms", o.deadline_ms, "wait at most so many ms")->capture_default_str();
  for (auto* verb : {pages, quantize, verify}) verb->add_option("--tenant", o.tenant, "of this tenant only");
  auto* set = app.add_subcommand("set", "change a setting until kvqd restarts");
  set->add_option("key", o.key, "quantize_at, evict_at, refuse_at, relief, quota.TENANT or share.TENANT")->required();
  set->add_option("value", o.value, "as in the configuration file: 0.6, 4GiB")->required();
  auto* drain = app.add_subcommand("drain", "admit nothing new, wait for the sessions to end, end kvqd");
  drain->add_option("--deadline", o.deadline_s, "seconds to wait at most")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  for (auto* verb : {status, sessions, tenants, pages, quantize, evict, verify, set, drain}) {
    verb->add_flag("--json", o.json, "the daemon's document as JSON");
    verb->fallthrough();
  }
}

int run(int argc, char** argv) {
  CLI::App app{"Shows and tunes a running kvqd."};
  Options options;
  add_verbs(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::cerr << "kvqctl: " << error.what() << "; see kvqctl --help\n";
    return kUsage;
  }
  if (app.get_subcommands().empty()) {
    std::cerr << "kvqctl: no verb given; see kvqctl --help\n";
    return kUsage;
  }
  if (options.socket.empty()) {
    const char* from_environment = std::getenv("KVQ_SOCKET");
    options.socket = from_environment != nullptr && *from_environment != '\0' ? from_environment : kDefaultSocket;
  }
  try {
    const std::string verb = app.get_subcommands().front()->get_name();
    if (verb == "top") {
      top({options.socket, options.interval_s, !options.no_color});
    } else {
      AdminClient admin(options.socket);
      run_verb(verb, options, admin);
    }
  } catch (const Failure& failure) {
    std::cerr << "kvqctl: " << failure.what() << "\n";
    return failure.exit_code;
  } catch (const nlohmann::json::exception& error) {
    std::cerr << "kvqctl: kvqd's reply is not what this kvqctl knows (" << error.what()
              << "); install both of one release\n";
    return kRefused;
  }
  return kOk;
}

}  // namespace
}  // namespace kvqctl

int main(int argc, char** argv) { return kvqctl::run(argc, argv); }

// Verbs and their options.
#include <CLI/CLI.hpp>
#include <cstdlib>

#include "tools/kvqctl/options.h"

namespace kvqctl {
namespace {

constexpr char kDefaultSocket[] = "/run/kvq/kvqd.sock";

void add_views(CLI::App& app, Options& o) {
  auto* top = app.add_subcommand("top", "a full-screen live view; ? shows its keys");
  top->add_option("--interval", o.interval_s, "look every SECONDS")
      ->check(CLI::Range(0.25, 60.0))
      ->capture_default_str();
  top->add_flag("--no-color", o.no_color, "no colours; so does the variable NO_COLOR");
  auto* status = app.add_subcommand("status", "the daemon, its arena and its tenants");
  auto* sessions = app.add_subcommand("sessions", "model servers: what each holds, and which one hangs");
  auto* tenants = app.add_subcommand("tenants", "memory by tenant");
  auto* pages = app.add_subcommand("pages", "single pages");
  pages->add_option("--limit", o.limit, "at most so many")->check(CLI::Range(1, 10'000))->capture_default_str();
  auto* sequences = app.add_subcommand("sequences", "what each sequence holds, the longest first");
  sequences->add_option("--session", o.session, "of this session only")->check(CLI::PositiveNumber);
  auto* prefix = app.add_subcommand("prefix", "the prefix index: how much is cached and reused, and cached chains");
  for (auto* verb : {sequences, prefix}) {
    verb->add_option("--limit", o.limit, "at most so many")->check(CLI::Range(1, 1000))->capture_default_str();
  }
  for (auto* verb : {pages, sequences, prefix}) {
    verb->add_option("--device", o.device, "on this device only: a GPU's UUID as kvqctl status names it, or host");
    verb->add_option("--tenant", o.tenant, "of this tenant only");
  }
  for (auto* verb : {status, sessions, tenants, pages, sequences, prefix}) {
    verb->add_option("--watch", o.watch_s, "show again every SECONDS")->check(CLI::Range(0.1, 3600.0));
  }
  auto* events = app.add_subcommand("events", "what kvqd decided lately, a line each");
  events->add_option("--limit", o.limit, "the last so many")->check(CLI::Range(1, 1000))->capture_default_str();
  events->add_flag("--follow", o.follow, "go on with those to come, over restarts of kvqd");
  auto* doctor =
      app.add_subcommand("doctor", "looks for what is wrong with this machine, and names the fix; needs no kvqd");
  auto* bench =
      app.add_subcommand("bench", "measures this kvqd as a client: calls, pages, attention; leaves nothing behind");
  bench->add_option("--seconds", o.seconds, "for all measurements together, about")
      ->check(CLI::Range(0.5, 600.0))
      ->capture_default_str();
  auto* completion = app.add_subcommand("completion", "prints a script that completes kvqctl's verbs and options");
  completion->add_option("shell", o.shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  for (auto* verb : {status, sessions, tenants, pages, sequences, prefix, events, doctor, bench}) {
    verb->add_flag("--json", o.json, "as JSON");
  }
}

// What is cached, what is sparse, how much there is.
void add_room(CLI::App& app, Options& o) {
  auto* evict = app.add_subcommand("evict", "drop cached pages that nobody holds and nobody used lately");
  evict->add_option("--idle", o.idle_ms, "unused for at least so many ms")->capture_default_str();
  auto* compact = app.add_subcommand("compact", "move pages out of sparse slabs, so that these become free");
  for (auto* verb : {evict, compact}) verb->add_option("--tenant", o.tenant, "of this tenant only");
  auto* resize = app.add_subcommand("resize", "change the size of the arena while it serves");
  resize->add_option("size", o.size, "of each device's arena, such as 8GiB: whole slabs")->required();
  resize->add_option("--device", o.device, "of this device only: a GPU's UUID as kvqctl status names it, or host");
  for (auto* verb : {evict, compact, resize}) {
    verb->add_flag("--dry-run", o.dry_run, "only say what it would do");
    verb->add_flag("--json", o.json, "as JSON");
  }
}

void add_changes(CLI::App& app, Options& o) {
  auto* quantize = app.add_subcommand("quantize", "quantize dense pages that nobody used lately");
  quantize->add_option("--idle", o.idle_ms, "unused for at least so many ms")->capture_default_str();
  auto* evict = app.add_subcommand("evict-session", "end a session, whatever its process does");
  evict->add_option("session", o.session, "its number in kvqctl sessions")->required();
  evict->add_flag("--kill", o.kill, "kill its process, too");
  auto* verify = app.add_subcommand("verify", "compare every sealed page with its checksum");
  verify->add_option("--deadline-ms", o.deadline_ms, "wait at most so many ms")->capture_default_str();
  for (auto* verb : {quantize, verify}) verb->add_option("--tenant", o.tenant, "of this tenant only");
  auto* set = app.add_subcommand("set", "change a setting until kvqd restarts or reloads");
  set->add_option("key", o.key, "quantize_at, evict_at, refuse_at, relief, quota.TENANT or share.TENANT")->required();
  set->add_option("value", o.value, "as in the configuration file: 0.6, 4GiB")->required();
  auto* drain = app.add_subcommand("drain", "admit nothing new, wait for the sessions to end, end kvqd");
  drain->add_option("--deadline", o.deadline_s, "seconds to wait at most")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  set->add_flag("--save", o.save, "write it into kvqd's configuration file, too");
  for (auto* verb : {quantize, evict, set, drain}) verb->add_flag("--dry-run", o.dry_run, "only say what it would do");
  for (auto* verb : {quantize, evict, verify, set, drain}) verb->add_flag("--json", o.json, "as JSON");
}

}  // namespace

void add_verbs(CLI::App& app, Options& o) {
  app.require_subcommand(0, 1);  // a wrong verb is named only when none is required
  app.add_option("--socket", o.socket, "kvqd's socket (else KVQ_SOCKET, else " + std::string(kDefaultSocket) + ")");
  add_views(app, o);
  add_room(app, o);
  add_changes(app, o);
  for (auto* verb : app.get_subcommands({})) verb->fallthrough();
}

std::string socket_of(const Options& o) {
  if (!o.socket.empty()) return o.socket;
  const char* from_environment = std::getenv("KVQ_SOCKET");
  return from_environment != nullptr && *from_environment != '\0' ? from_environment : kDefaultSocket;
}

}  // namespace kvqctl

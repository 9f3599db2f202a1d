// kvq-hold: keeps a daemon's descriptors while it is down, where no systemd does, and starts it again.
//
// Exit codes are the daemon's own, or those of failure.h. Events are one line each on stderr.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "tools/kvq-hold/failure.h"
#include "tools/kvq-hold/holder.h"
#include "tools/kvq-hold/listener.h"

namespace kvq_hold {
namespace {

constexpr char kAbout[] =
    "Runs a daemon that speaks the service manager's notify protocol, holds the descriptors it stores (FDSTORE=1), "
    "and\n"
    "starts it again with them when it dies. SIGHUP restarts it (an upgrade), SIGTERM ends both.\n"
    "  kvq-hold --socket /run/kvq/kvqd.sock -- kvqd --config /etc/kvq/kvqd.toml";

void add_options(CLI::App& app, Options& options, std::string& mode) {
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--socket", options.socket,
                 "listening socket to make and pass, so that clients wait while the daemon is down");
  app.add_option("--socket-group", options.socket_group, "group that may connect");
  app.add_option("--socket-mode", mode, "its mode, octal")->capture_default_str();
  app.add_option("--restart-ms", options.restart_ms, "wait after a death")->capture_default_str();
  app.add_option("--give-up-after", options.give_up_after, "more deaths than this end it...")->capture_default_str();
  app.add_option("--within-ms", options.within_ms, "...when they come within this time")->capture_default_str();
  app.add_option("--max-descriptors", options.max_descriptors, "most that are held")->capture_default_str();
}

// What stands after "--" is the daemon's, whatever it looks like.
std::vector<std::string> split_command(int& argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) != "--") continue;
    std::vector<std::string> command(argv + i + 1, argv + argc);
    argc = i;
    return command;
  }
  return {};
}

unsigned octal(const std::string& text) {
  std::size_t used = 0;
  unsigned long mode = 01000;
  try {
    mode = std::stoul(text, &used, 8);
  } catch (const std::exception&) {
  }
  if (used != text.size() || mode > 0777) throw Failure(kUsage, "--socket-mode " + text + ": write it as in 0660");
  return static_cast<unsigned>(mode);
}

int run(int argc, char** argv) {
  keep_from_child();
  Options options;
  std::string mode = "0660";
  CLI::App app(kAbout, "kvq-hold");
  add_options(app, options, mode);
  options.command = split_command(argc, argv);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return kOk;
  } catch (const CLI::ParseError& error) {
    throw Failure(kUsage, std::string(error.what()) + "; kvq-hold --help");
  }
  if (options.command.empty()) throw Failure(kUsage, "no daemon: end the line with -- kvqd ARGUMENTS");
  options.socket_mode = octal(mode);
  std::optional<Listener> listener;
  if (!options.socket.empty()) listener.emplace(options.socket, options.socket_group, options.socket_mode);
  return Holder(options, listener ? listener->fd() : -1).run();
}

}  // namespace
}  // namespace kvq_hold

int main(int argc, char** argv) {
  try {
    return kvq_hold::run(argc, argv);
  } catch (const kvq_hold::Failure& failure) {
    std::fprintf(stderr, "kvq-hold: %s\n", failure.what());
    return failure.code;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kvq-hold: %s\n", error.what());
    return kvq_hold::kEnvironment;
  }
}

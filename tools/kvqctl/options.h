// What a command line asks for.
//
// Invariant: each member has one option or argument of command_line.cc.
#pragma once

#include <cstdint>
#include <string>

namespace CLI {
class App;
}

namespace kvqctl {

struct Options {
  std::string socket;
  bool json = false;
  double watch_s = 0;  // 0: once
  double interval_s = 1;
  bool no_color = false;
  double seconds = 3;
  std::string tenant, device;
  std::uint32_t limit = 100;
  std::uint64_t idle_ms = 0;
  bool dry_run = false, save = false;
  std::string key, value;
  std::string size;
  double deadline_s = 60;
  std::uint32_t session = 0;
  bool kill = false;
  std::uint32_t deadline_ms = 60'000;
  bool follow = false;
  std::string shell;
};

void add_verbs(CLI::App& app, Options& options);  // `options` outlives `app`
std::string socket_of(const Options& options);    // --socket, else KVQ_SOCKET, else the default

}  // namespace kvqctl

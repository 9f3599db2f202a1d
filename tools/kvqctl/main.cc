// kvqctl: shows and tunes a running kvqd. Thin: the daemon decides and reports, this formats.
//
// Exit codes are in admin_client.h. Errors are one line on stderr: cause and fix.
#include <CLI/CLI.hpp>
#include <iostream>

#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/completion.h"
#include "tools/kvqctl/tables.h"
#include "tools/kvqctl/verbs.h"

namespace kvqctl {
namespace {

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
  if (!options.shell.empty()) {
    std::cout << completion_for(options.shell, app);
    return kOk;
  }
  try {
    run_verb(app.get_subcommands().front()->get_name(), options);
  } catch (const Failure& failure) {
    std::cerr << "kvqctl: " << failure.what() << "\n";
    return failure.exit_code;
  } catch (const Json::exception& error) {
    std::cerr << "kvqctl: kvqd's reply is not what this kvqctl knows (" << error.what()
              << "); install both of one release\n";
    return kRefused;
  }
  return kOk;
}

}  // namespace
}  // namespace kvqctl

int main(int argc, char** argv) { return kvqctl::run(argc, argv); }

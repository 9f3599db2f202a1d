// The loop of top: a look if there is one, a frame, a key.
#include "tools/kvqctl/top.h"

#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "tools/kvqctl/feed.h"
#include "tools/kvqctl/screen.h"
#include "tools/kvqctl/top_model.h"

namespace kvqctl {
namespace {

constexpr int kKeyWaitMs = 100;

volatile std::sig_atomic_t told_to_end = 0;

bool no_colour_wished() {
  const char* wish = std::getenv("NO_COLOR");
  return wish != nullptr && *wish != '\0';
}

// Waiting would not help a user who may not ask.
void take_look(Feed& feed, TopModel& model, bool& ever) {
  const auto look = feed.take();
  if (!look) return;
  if (const auto* sample = std::get_if<Sample>(&*look)) {
    ever = true;
    return model.add(*sample);
  }
  const Failure& failure = std::get<Failure>(*look);
  if (!ever && failure.exit_code != kNoDaemon) throw failure;
  model.lost(failure.what(), clock_ms());
}

}  // namespace

void top(const TopOptions& options) {
  if (::isatty(STDIN_FILENO) == 0 || ::isatty(STDOUT_FILENO) == 0) {
    throw Failure(kUsage, "top needs a terminal; in a script use kvqctl status --watch 1, with --json for a program");
  }
  TopModel model(options.socket, static_cast<std::uint64_t>(options.interval_s * 1000));
  Feed feed(options.socket, model.interval_ms());
  Screen screen(options.colours && !no_colour_wished());
  for (int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { told_to_end = 1; });
  bool goes_on = true, ever = false;
  while (goes_on && told_to_end == 0) {
    take_look(feed, model, ever);
    screen.draw(model.frame(screen.width(), screen.height(), clock_ms()));
    if (const int key = screen.key(kKeyWaitMs); key != 0) goes_on = model.press(key);
    feed.set_interval(model.interval_ms());
  }
}

}  // namespace kvqctl

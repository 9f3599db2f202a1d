// kvqd: parse, build the parts in order, run, tear down in reverse.
//
// Exit codes are in exit_code.h. Whatever ends start-up is one line "kvqd: cause; fix" on stderr.
#include <kj/debug.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>

#include "daemon/intake.h"
#include "daemon/kill_at.h"
#include "daemon/limits.h"
#include "daemon/listen_socket.h"
#include "daemon/log.h"
#include "daemon/metrics/metrics_server.h"
#include "daemon/metrics/node_metrics.h"
#include "daemon/metrics_socket.h"
#include "daemon/parts.h"
#include "daemon/reload.h"
#include "daemon/rpc/rpc.h"
#include "daemon/setup.h"
#include "daemon/status_line.h"

namespace kvq {
namespace {

constexpr std::uint64_t kUnlistedTenants = 64;  // most that are made by uid
constexpr std::uint64_t kSlabsOfAnyGpu = 1024;  // that a share of its memory may come to, where that is unknown
constexpr std::uint64_t kNotifyRetryMs = 5;     // while the service manager's queue is full
constexpr std::uint64_t kNotifyEndMs = 5000;    // longest that the end waits for it
constexpr std::uint64_t kStatusMs = 5000;       // how old the figures of `systemctl status` may be

using ReadAgain = std::function<CommandLine()>;

// As a value of an event.
std::string in_quotes(std::string text) {
  for (char& c : text) {
    if (c < ' ' || c == '"') c = ' ';
  }
  return text;
}

// What KJ has to say (a peer that sends garbage, mostly) goes to the log, within its bounds.
class KjLog final : public kj::ExceptionCallback {
 public:
  explicit KjLog(std::function<void(const std::string&)> log) : log_(std::move(log)) {}
  void logMessage(kj::LogSeverity, const char*, int, int, kj::String&& text) override {
    log_("event=rpc_fault text=\"" + in_quotes({text.cStr(), std::min<std::size_t>(text.size(), 200)}) + "\"");
  }

 private:
  const std::function<void(const std::string&)> log_;
};

// The device's work on the loop's worker pool. Its owner waits for `idle` before the device goes.
class Workers final : private kj::TaskSet::ErrorHandler {
 public:
  explicit Workers(EventLoop& loop) : loop_(loop), jobs_(*this) {}
  void run(std::function<void()> work, std::function<void()> done) {
    jobs_.add(loop_.submit_blocking(std::move(work)).then(std::move(done)));
  }
  kj::Promise<void> idle() { return jobs_.onEmpty(); }

 private:
  void taskFailed(kj::Exception&& exception) override { kj::throwFatalException(kj::mv(exception)); }
  EventLoop& loop_;
  kj::TaskSet jobs_;
};

// Messages that wait for the service manager's queue go out from the loop.
class NotifyRetry final {
 public:
  NotifyRetry(EventLoop& loop, Notify& notify) : loop_(loop), notify_(notify) {
    notify_.on_waiting([this] {
      retry_ = loop_.every(kNotifyRetryMs, [this] {
        if (notify_.flush()) retry_.cancel();
      });
    });
  }
  ~NotifyRetry() {
    notify_.on_waiting([] {});
  }

  // Runs the loop until nothing waits any more, or for kNotifyEndMs.
  void finish() {
    if (notify_.flush()) return;
    auto done = kj::newPromiseAndFulfiller<void>();
    const std::uint64_t end_ms = loop_.now_ms() + kNotifyEndMs;
    retry_ = loop_.every(kNotifyRetryMs, [&] {
      if (notify_.flush() || loop_.now_ms() >= end_ms) done.fulfiller->fulfill();
    });
    loop_.run(kj::mv(done.promise));
    if (notify_.waiting() > 0) log_warning("event=notify_unsent messages=" + std::to_string(notify_.waiting()));
    retry_.cancel();
  }

 private:
  EventLoop& loop_;
  Notify& notify_;
  EventLoop::Watch retry_;
};

// On the host: a quarter of the processors, since the others are the model servers'.
unsigned transcode_threads() {
  const long processors = ::sysconf(_SC_NPROCESSORS_ONLN);
  return static_cast<unsigned>(std::clamp(processors / 4, 2l, 16l));
}

Needs needs_of(const Config& config, const DeviceChoice& choice, bool kept) {
  const bool gpu = config.device == DeviceKind::cuda;  // then pages take no memory of this machine
  const std::uint64_t slab_bytes = gpu ? config.gpu_slab_bytes : config.slab_bytes;
  const std::uint64_t share_bytes = choice.most_bytes / 100 * config.arena_percent;
  const std::uint64_t slabs_of_share = choice.most_bytes == 0 ? kSlabsOfAnyGpu : share_bytes / slab_bytes;
  return {.devices = choice.uuids.size(),
          .gpus = !choice.uuids.front().empty(),
          .arena_bytes = gpu ? 0 : config.arena_bytes,
          .slabs = config.arena_percent != 0 ? slabs_of_share : config.arena_bytes / slab_bytes,
          .sessions = config.max_sessions,
          .tenants = config.tenants.size() + (config.allow_unlisted ? kUnlistedTenants : 0),
          .lock_memory = config.lock_memory,
          .kept = kept,
          .runtime_directory = directory_of(config.socket)};
}

// Ends with everything kept when a signal or lost pages end it and somebody keeps: the next kvqd goes on with what it
// can have. A drain has ended the sessions, so nothing is left to keep.
void serve_until_told(EventLoop& loop, RpcServer& server, kj::Promise<void> told_to_end, ServiceKeeper& keeper,
                      Notify& notify) {
  bool drained = false;
  loop.run(told_to_end.exclusiveJoin(server.drained().then([&drained] { drained = true; })));
  if (drained) {
    keeper.forget_all();
  } else if (keeper.active()) {
    server.leave();
  }
  notify.send("STOPPING=1");
}

// Nothing of a device whose memory ends with it can be taken over, whatever exporter the next kvqd is told to use.
void forget_what_ends(const Parts& parts) {
  for (const Part& part : parts.served) {
    if (!part.made.device->can_adopt()) part.keeper->forget_all();
  }
}

// `server` may end before the watches do.
std::vector<EventLoop::Watch> watch_devices(EventLoop& loop, const Parts& parts,
                                            const std::unique_ptr<RpcServer>& server) {
  std::vector<EventLoop::Watch> out;
  for (std::size_t i = 0; i < parts.served.size(); ++i) {
    out.push_back(watch_device(loop, *parts.served[i].made.device, [&server, i] {
      if (server != nullptr) server->tick_soon(i);
    }));
  }
  return out;
}

std::string ready_line(const Config& config, const Parts& parts) {
  const Device& first = *parts.served.front().made.device;
  return "event=ready socket=" + config.socket + " arena_bytes=" + std::to_string(first.arena_bytes()) +
         " slab_bytes=" + std::to_string(first.slab_bytes()) + " devices=" + std::to_string(parts.served.size()) +
         " device=\"" + devices_text(parts) + "\"";
}

// Null where they are off. No port is worth the pages that an earlier kvqd left: then kvqd goes on without metrics.
std::unique_ptr<MetricsSocket> bind_metrics(const Config& config, bool takes_over) {
  if (config.metrics.off()) return nullptr;
  try {
    return std::make_unique<MetricsSocket>(MetricsSocketOptions{.path = config.metrics.path,
                                                                .group = config.admin_group,
                                                                .host = config.metrics.host,
                                                                .port = config.metrics.port});
  } catch (const StartupError& error) {
    if (!takes_over) throw;
    log_warning("event=metrics_off why=\"" + std::string(error.what()) + "\"");
    return nullptr;
  }
}

std::unique_ptr<MetricsServer> start_metrics(kj::AsyncIoContext& io, const MetricsSocket* socket,
                                             const RpcServer& server, std::function<void(const std::string&)> log) {
  if (socket == nullptr) return nullptr;
  return serve_metrics(io, socket->fd(),
                       {.text = [&server] { return metrics_text(server.report()); }, .log = std::move(log)});
}

EventLoop::Watch feed_watchdog(EventLoop& loop, Notify& notify) {
  if (watchdog_ms() < 2) return {};
  return loop.every(watchdog_ms() / 2, [&notify] {
    if (notify.waiting() == 0) notify.send("WATCHDOG=1");
  });
}

std::string status_text(const RpcServer& server, const Parts& parts) {
  return "STATUS=" + status_line(server.report()) + "; " + states_text(parts);
}

// The service manager shows the figures of the last seconds; nothing is said again.
EventLoop::Watch tell_status(EventLoop& loop, Notify& notify, std::function<std::string()> text) {
  if (!notify.active()) return {};
  return loop.every(kStatusMs, [&notify, text = std::move(text), last = std::string()]() mutable {
    std::string now = text();
    if (now == last || notify.waiting() > 0) return;
    notify.send(now);
    last = std::move(now);
  });
}

// The command line and its file are read again. Those that are refused change nothing.
EventLoop::Watch reload_on_hangup(EventLoop& loop, Notify& notify, const Config& started, ReadAgain read_again,
                                  const Parts& parts, Configured& settings,
                                  std::function<void(const std::string&)> log) {
  std::vector<Store*> stores;
  for (const Part& part : parts.served) stores.push_back(part.made.store.get());
  return loop.on_signal(SIGHUP, [&, read_again, stores, log = std::move(log)] {
    notify.send("RELOADING=1\nMONOTONIC_USEC=" + std::to_string(loop.now_ms() * 1000));
    const CommandLine next = read_again();
    if (next.config) {
      log(reload(started, *next.config, stores));
      settings = configured(*next.config);
    } else {
      log("event=reload_refused why=\"" + in_quotes(next.message) + "\"");
    }
    notify.send("READY=1");
  });
}

// `ready` turns true when clients are served: what fails before is the machine's refusal to let kvqd start.
ExitCode run(const Config& config, const ReadAgain& read_again, bool& ready) {
  Intake intake = take_descriptors();
  Notify notify(notify_address(), log_warning);
  const DeviceChoice choice = choose_devices(config, intake.kept);
  for (const std::string& warning : intake.warnings) log_warning("event=warning text=\"" + warning + "\"");
  const Needs needs = needs_of(config, choice, notify.active());
  for (const std::string& warning : check_environment(needs)) log_warning("event=warning text=\"" + warning + "\"");
  const ListenSocket socket({.path = config.socket, .group = config.socket_group, .handed = intake.socket.release()});
  const std::unique_ptr<MetricsSocket> metrics_socket = bind_metrics(config, !intake.kept.empty());
  auto io = kj::setupAsyncIo();
  EventLoop loop(io, transcode_threads());
  EventRing events;  // the lines of the log
  const auto log = [&](const std::string& line) {
    if (std::string told = log_event(line, loop.now_ms()); !told.empty()) events.add(std::move(told), loop.now_ms());
  };
  KjLog kj_log(log);
  auto lost = kj::newPromiseAndFulfiller<void>();  // pages, with the worker of their GPU
  bool pages_lost = false;
  auto told_to_end = loop.on_terminate().ignoreResult().exclusiveJoin(lost.promise.then([&] { pages_lost = true; }));
  NotifyRetry notify_retry(loop, notify);
  ServiceKeeper keeper(notify, intake.kept);

  std::unique_ptr<RpcServer> server;
  Workers workers(loop);
  const auto run_blocking = [&](std::function<void()> work, std::function<void()> done) {
    workers.run(std::move(work), [&server, done = std::move(done)] {
      done();
      if (server != nullptr) server->tick_soon();
    });
  };
  Parts parts = make_parts({.device = {config, most_slabs(needs, read_room(needs)), run_blocking, log,
                                       [&lost] { lost.fulfiller->fulfill(); }},
                            .keeper = keeper,
                            .store = store_config(config),
                            .deliver = [&](std::size_t part, const SlabNotice& n) { server->deliver(n, part); }},
                           choice, std::move(intake.kept), loop.now_ms());
  Configured settings = configured(config);
  std::vector<RpcPart> rpc_parts;
  for (Part& part : parts.served) {
    rpc_parts.push_back({*part.made.store, rpc_options(config, *part.made.store, *part.made.device)});
    RpcOptions& options = rpc_parts.back().options;
    options.served_as = part.uuid;
    options.not_served = parts.not_served;
    options.log = log;
    options.configured = &settings;
    options.events = &events;
    options.keeper = keeper.active() ? part.keeper.get() : nullptr;
    options.kept = &part.made.sessions;
  }
  server = serve(loop, *io.lowLevelProvider, std::move(rpc_parts), socket.fd());
  std::unique_ptr<MetricsServer> metrics = start_metrics(io, metrics_socket.get(), *server, log);
  const std::vector<EventLoop::Watch> device_watches = watch_devices(loop, parts, server);
  const EventLoop::Watch watchdog = feed_watchdog(loop, notify);
  const EventLoop::Watch hangup = reload_on_hangup(loop, notify, config, read_again, parts, settings, log);
  log(ready_line(config, parts));
  EventLoop::Watch status = tell_status(loop, notify, [&] { return status_text(*server, parts); });
  notify.send("READY=1\n" + status_text(*server, parts));
  ready = true;
  serve_until_told(loop, *server, kj::mv(told_to_end), keeper, notify);
  if (!pages_lost) forget_what_ends(parts);  // else the names stay, so that the next kvqd says why it starts clean
  log("event=stopping sessions=" + std::to_string(server->sessions()));
  status.cancel();  // it asks the server
  metrics.reset();
  server.reset();
  loop.run(workers.idle());
  notify_retry.finish();
  return pages_lost ? ExitCode::pages_lost : ExitCode::ok;
}

int main_with(int argc, char** argv) {
  const CommandLine command = parse_command_line(argc, argv);
  if (!command.config) {
    const bool asked = command.exit_code == ExitCode::ok;  // for help, version or a check
    std::fprintf(asked ? stdout : stderr, "%s%s\n", asked ? "" : "kvqd: ", command.message.c_str());
    return static_cast<int>(command.exit_code);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a memory file past RLIMIT_FSIZE is an error to report, no reason to die
  kill_where_told();
  start_log(command.config->log_level);
  bool ready = false;
  std::string problem;
  try {
    check_file_size(*command.config);
    return static_cast<int>(run(
        *command.config, [&] { return parse_command_line(argc, argv); }, ready));
  } catch (const StartupError& error) {
    std::fprintf(stderr, "kvqd: %s\n", error.what());
    return static_cast<int>(error.code);
  } catch (const kj::Exception& exception) {
    problem = exception.getDescription().cStr();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  std::fprintf(stderr, "kvqd: %s: %s\n", ready ? "failed" : "cannot start", problem.c_str());
  return static_cast<int>(ready ? ExitCode::failure : ExitCode::environment);
}

}  // namespace
}  // namespace kvq

int main(int argc, char** argv) { return kvq::main_with(argc, argv); }

// kvqd: parse, build the parts in order, run, tear down in reverse.
//
// Exit codes are in exit_code.h. Whatever ends start-up is one line "kvqd: cause; fix" on stderr.
#include <kj/debug.h>

#include <csignal>
#include <cstdio>

#include "daemon/limits.h"
#include "daemon/listen_socket.h"
#include "daemon/log.h"
#include "daemon/notify.h"
#include "daemon/rpc/rpc.h"
#include "daemon/setup.h"

namespace kvq {
namespace {

constexpr std::uint64_t kUnlistedTenants = 64;  // most that are made by uid

// What KJ has to say (a peer that sends garbage, mostly) goes to the log, within its bounds.
class KjLog final : public kj::ExceptionCallback {
 public:
  explicit KjLog(EventLoop& loop) : loop_(loop) {}
  void logMessage(kj::LogSeverity, const char*, int, int, kj::String&& text) override {
    log_event("event=rpc_fault text=\"" + one_line(text) + "\"", loop_.now_ms());
  }

 private:
  static std::string one_line(kj::StringPtr text) {
    std::string out(text.cStr(), std::min<std::size_t>(text.size(), 200));
    for (char& c : out) {
      if (c < ' ' || c == '"') c = ' ';
    }
    return out;
  }
  EventLoop& loop_;
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

Needs needs_of(const Config& config) {
  return {.arena_bytes = config.arena_bytes,
          .slabs = config.arena_bytes / config.slab_bytes,
          .sessions = config.max_sessions,
          .tenants = config.tenants.size() + (config.allow_unlisted ? kUnlistedTenants : 0),
          .lock_memory = config.lock_memory,
          .runtime_directory = directory_of(config.socket)};
}

// `ready` turns true when clients are served: what fails before is the machine's refusal to let kvqd start.
void run(const Config& config, bool& ready) {
  for (const std::string& warning : check_environment(needs_of(config)))
    log_warning("event=warning text=\"" + warning + "\"");
  const ListenSocket socket({.path = config.socket, .group = config.socket_group});
  auto io = kj::setupAsyncIo();
  EventLoop loop(io, config.workers);
  auto told_to_end = loop.on_terminate();
  KjLog kj_log(loop);
  const auto log = [&loop](const std::string& line) { log_event(line, loop.now_ms()); };

  std::unique_ptr<RpcServer> server;
  Workers workers(loop);
  const auto run_blocking = [&](std::function<void()> work, std::function<void()> done) {
    workers.run(std::move(work), [&server, done = std::move(done)] {
      done();
      if (server != nullptr) server->tick_soon();
    });
  };
  const auto device = make_host_device(config.arena_bytes, config.slab_bytes, run_blocking);
  const auto store = Store::create(
      store_config(config), *device, [&](const SlabNotice& notice) { server->deliver(notice); }, log);
  RpcOptions options = rpc_options(config, *store);
  options.device = device->name();
  options.log = log;
  server = serve(loop, *io.lowLevelProvider, *store, socket.fd(), std::move(options));

  EventLoop::Watch watchdog;
  if (watchdog_ms() >= 2) watchdog = loop.every(watchdog_ms() / 2, notify_alive);
  log("event=ready socket=" + config.socket + " arena_bytes=" + std::to_string(config.arena_bytes) +
      " slab_bytes=" + std::to_string(config.slab_bytes) + " device=" + device->name());
  notify_ready("serving " + config.socket);
  ready = true;
  loop.run(told_to_end.ignoreResult().exclusiveJoin(server->drained()));
  log("event=stopping sessions=" + std::to_string(server->sessions()));
  notify_stopping();
  server.reset();
  loop.run(workers.idle());
}

int main_with(int argc, char** argv) {
  const CommandLine command = parse_command_line(argc, argv);
  if (!command.config) {
    const bool asked = command.exit_code == ExitCode::ok;  // for help, version or a check
    std::fprintf(asked ? stdout : stderr, "%s%s\n", asked ? "" : "kvqd: ", command.message.c_str());
    return static_cast<int>(command.exit_code);
  }
  std::signal(SIGPIPE, SIG_IGN);
  start_log(command.config->log_level);
  bool ready = false;
  std::string problem;
  try {
    check_file_size(*command.config);
    run(*command.config, ready);
    return static_cast<int>(ExitCode::ok);
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

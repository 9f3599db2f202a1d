// GET /metrics over HTTP, on a listening socket that is the caller's.
//
// Invariant: everything runs on the loop thread and nothing here waits for a reader: there are at most
// `max_connections`, each has `deadline_ms` for its request and for reading the answer, and the text is made at most
// once in `fresh_ms`, however often it is asked for. Who goes past a limit is cut, and the log says so.
#pragma once

#include <kj/async-io.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace kvq {

struct MetricsServerOptions {
  std::function<std::string()> text;
  std::function<void(const std::string& line)> log = [](const std::string&) {};  // key=value text, one event each
  std::uint32_t max_connections = 16;
  std::uint32_t deadline_ms = 5000;
  std::uint32_t fresh_ms = 50;
};

class MetricsServer {
 public:
  virtual ~MetricsServer() = default;
};

// `io` and what `options.text` reads outlive the server.
std::unique_ptr<MetricsServer> serve_metrics(kj::AsyncIoContext& io, int listening_fd, MetricsServerOptions options);

}  // namespace kvq

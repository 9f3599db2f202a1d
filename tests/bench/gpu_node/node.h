// A kvqd on the GPU for one topic, under a holder, and what kvqctl says of it.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/held_daemon.h"

namespace kvq::bench {

struct NodeOptions {
  std::string arena_bytes = "16GiB", slab_bytes = "256MiB";
  double quantize_at = 0.97, evict_at = 0.98, refuse_at = 0.99, relief = 0.01;
  std::uint32_t max_pages = 65536, residual_window_pages = 4;
  std::vector<std::string> environment;  // NAME=VALUE for kvqd and its worker
};

class Node {
 public:
  explicit Node(const NodeOptions& options);

  const std::string& socket() const { return daemon_.socket(); }
  test::HeldDaemon& daemon() { return daemon_; }
  // A command of kvqctl that prints JSON; throws what it says when it fails.
  nlohmann::json ask(const std::string& command) const;
  // Until nothing is left to quantize; throws after 10 s.
  void quantize_all() const;

 private:
  test::HeldDaemon daemon_;
};

}  // namespace kvq::bench

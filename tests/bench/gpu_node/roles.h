// The server processes of a topic: this program, started again with --role, which prints one JSON document at its end.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/bench/gpu_node/topics.h"

namespace kvq::bench {

// A server that decodes over a shared document until --milliseconds are over or it gets SIGTERM, goes on with each next
// edition of it that is there, and compares each step's results with the right ones, in all layers. After "ready" it
// decodes; from a SIGUSR1 on it measures, and says "enough" after --steps measured ones.
// --socket S --milliseconds T --tokens N --graph 0|1 --steps N --credits N
// With --step-us U, or --passes P, a step goes over the layers as often as takes U alone on the GPU, or P times, by
// replayed graphs. Then it decodes until SIGTERM; steps count in windows, which each SIGUSR2 opens or closes; and at
// SIGUSR1 it prints what it counted since the last one, a JSON document with `passes`.
int decoder(const Arguments& arguments);
// A server whose short sequences come and go, so that pages are appended, quantized, compacted and dropped all the
// time; between them it writes a new edition of the decoders' document every --edition-ms (0: none).
// --socket S --milliseconds T --tokens N (of each sequence) --sequences K (alive at once) --document N (its tokens)
// --credits N
int churner(const Arguments& arguments);

// A server whose dense pages turn into int4 ones at a steady rate, without a kernel of its own: it has written them
// before it says "ready". From a SIGUSR1 on it parks sequences one after another, until all are parked or --window-ms
// is over; says "spent", and how many pages that were; at the next SIGUSR1 it writes as many anew, and is ready again.
// --socket S --gib N (of pages) --mb-s R --window-ms T
int source(const Arguments& arguments);
// Pages of one of its sequences: what residual_window_pages must be for them to stay dense until they are parked.
inline constexpr std::uint32_t kSourcePages = 8;

// A server that was started again: opens the document, decodes once, says "decoded", and then whether that was right.
// --socket S --tokens N
int restarted(const Arguments& arguments);

// A server in the middle of a long kernel, in a step, until it is killed. --socket S
int stuck(const Arguments& arguments);

class Server {
 public:
  // `environment`: NAME=VALUE, beside this process's own.
  Server(const std::string& role, const std::vector<std::string>& options,
         const std::vector<std::string>& environment = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  void await(const std::string& word);  // until it has said so; throws when it ended before
  void await_ready() { await("ready"); }
  nlohmann::json next();    // what it says next, a JSON document
  nlohmann::json result();  // the same; then waits for its end; throws when it failed
  void kill();
  void signal(int number);
  int pid() const { return pid_; }

 private:
  std::string line();
  int pid_ = -1, out_ = -1;
  std::string buffer_;
};

// MPS for the processes that are given environment(); none elsewhere.
class Mps {
 public:
  Mps();
  ~Mps();
  bool works() const { return works_; }
  std::vector<std::string> environment() const;

 private:
  bool works_ = false;
};

}  // namespace kvq::bench

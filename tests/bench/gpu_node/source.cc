// Invariant: between "ready" and "spent" it launches nothing, so its context takes no time of the GPU. What it parks is
// quantized at once where the level is quantize: until then its pages are in the window of a running sequence.
#include <signal.h>

#include <chrono>
#include <deque>
#include <iostream>
#include <thread>

#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/roles.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t kTokens = kSourcePages * KVQ_PAGE_TOKENS;
constexpr double kBytes = kSourcePages * kDensePageBytes;  // of a sequence
volatile sig_atomic_t stopped = 0, begun = 0;              // SIGTERM, SIGUSR1

class Source {
 public:
  Source(Llama& llama, std::size_t sequences) : llama_(llama), sequences_(sequences) {}

  void fill() {
    parked_.clear();
    while (dense_.size() < sequences_ && stopped == 0) {
      dense_.push_back(llama_.open_private());
      llama_.grow(dense_.back(), 0, kTokens, ++written_ * kTokens);
    }
  }
  // Pages.
  std::uint64_t park(double bytes_per_s, std::chrono::milliseconds window) {
    const auto began = Clock::now();
    const auto apart = std::chrono::duration<double>(kBytes / bytes_per_s);
    std::uint64_t pages = 0;
    for (; !dense_.empty() && stopped == 0; pages += kSourcePages) {
      const auto due = began + std::chrono::duration_cast<Clock::duration>(apart * static_cast<double>(parked_.size()));
      if (due - began > window) break;
      std::this_thread::sleep_until(due);
      dense_.front().park();
      parked_.push_back(std::move(dense_.front()));
      dense_.pop_front();
    }
    return pages;
  }

 private:
  Llama& llama_;
  const std::size_t sequences_;
  std::deque<Sequence> dense_, parked_;
  std::uint64_t written_ = 0;
};

}  // namespace

int source(const Arguments& arguments) {
  ::signal(SIGTERM, [](int) { stopped = 1; });
  ::signal(SIGUSR1, [](int) { begun = 1; });
  const double bytes = static_cast<double>(arguments.number("gib", 32) << 30);
  const double bytes_per_s = 1e6 * static_cast<double>(arguments.number("mb-s", 1000));
  const std::chrono::milliseconds window(arguments.number("window-ms", 5000));
  Llama llama(arguments.text("socket"), 2);
  Source pages(llama, static_cast<std::size_t>(bytes / kBytes));
  const auto say = [](const std::string& what) {
    begun = 0;
    std::cout << what << std::endl;
    while (begun == 0 && stopped == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  };
  while (stopped == 0) {
    pages.fill();
    llama.synchronize();
    say("ready");
    const std::uint64_t parked = pages.park(bytes_per_s, window);
    say("spent\n" + nlohmann::json{{"pages", parked}}.dump());  // it has them until they were counted
  }
  return 0;
}

}  // namespace kvq::bench

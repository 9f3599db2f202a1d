// Looks at kvqd again and again, from a thread of its own, so that keys are answered while kvqd is not.
//
// Invariant: a look takes no longer than kAnswerMs, and so does the destructor. After a failure the next look connects
// anew: kvqd may have been restarted.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>

#include "tools/kvqctl/admin_client.h"
#include "tools/kvqctl/top_sample.h"

namespace kvqctl {

std::uint64_t clock_ms();  // monotonic

class Feed {
 public:
  Feed(std::string socket, std::uint64_t interval_ms);
  ~Feed();
  Feed(const Feed&) = delete;
  Feed& operator=(const Feed&) = delete;

  using Look = std::variant<Sample, Failure>;
  std::optional<Look> take();  // the last one that was not taken yet
  void set_interval(std::uint64_t interval_ms);

 private:
  static constexpr std::uint64_t kAnswerMs = 1000;
  void run();
  Look look(std::unique_ptr<AdminClient>& admin);

  const std::string socket_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t interval_ms_;
  bool ends_ = false;
  std::optional<Look> last_;
  std::thread thread_;
};

}  // namespace kvqctl

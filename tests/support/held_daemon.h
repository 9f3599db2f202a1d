// A kvqd that comes back: kvq-hold starts it, keeps its descriptors and starts it again when it dies.
//
// Invariant: the constructor returns once the first kvqd serves; the destructor ends both and waits for them. Deaths
// are counted by the holder's log, so that a test can wait for the next life.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace kvq::test {

class HeldDaemon {
 public:
  // `settings`: TOML after the socket's line. `environment`: NAME=VALUE for kvqd, beside the test's own. `program`: the
  // kvqd to run; empty: the one of this build. Throws std::runtime_error with its log when it does not start.
  explicit HeldDaemon(const std::string& settings, const std::vector<std::string>& environment = {},
                      const std::string& program = "");
  ~HeldDaemon();
  HeldDaemon(const HeldDaemon&) = delete;
  HeldDaemon& operator=(const HeldDaemon&) = delete;

  const std::string& socket() const { return socket_; }
  const std::string& directory() const { return directory_; }
  pid_t holder() const { return holder_; }
  pid_t pid() const;  // of the kvqd that runs now, 0 while none does

  // SIGKILL to kvqd, at once. Returns without waiting for the next.
  void kill();
  // SIGHUP to the holder: kvqd ends by itself and is started again.
  void upgrade();
  // The next kvqd runs `program`: a file at the same path, replaced by rename.
  void replace_program(const std::string& program);
  // Waits until `lives` kvqds (the first counts) have served in all; throws after a minute.
  void await_lives(std::uint32_t lives) const;
  std::uint32_t lives() const;  // that have served so far

  // Builds with kill points: the next kvqd dies the `n`-th time that it comes to `point`, or stops there ("stop").
  void plan(const std::string& point, std::uint64_t n = 1, const std::string& how = "kill") const;
  bool plan_is_done() const;
  std::set<std::string> reached() const;  // points that any kvqd came to

  std::string log() const;  // of the holder and every kvqd
  // Names that the holder keeps now, as its own log and /proc tell: how many descriptors it holds of them.
  std::uint32_t descriptors_held() const;

 private:
  std::string directory_, socket_, program_;
  pid_t holder_ = -1;
};

}  // namespace kvq::test

// A real kvqd for one test: in a directory of its own, gone when the object is.
//
// Invariant: the constructor returns once the daemon has said READY=1, the destructor once its process has been waited
// for.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvq::test {

class DaemonProcess {
 public:
  // `settings`: TOML after the socket's line, and lines of kvqd_arguments(). Throws std::runtime_error with the
  // daemon's stderr when it does not start.
  explicit DaemonProcess(const std::string& settings);
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  const std::string& socket() const { return socket_; }
  pid_t pid() const { return pid_; }
  // After stop: another kvqd of the same settings at the same socket. It knows nothing of the one before.
  void start();
  // Sends `signal` and waits for the end; returns waitpid's status.
  int stop(int signal);
  // What it has logged so far.
  std::string log() const;

 private:
  std::string directory_, socket_;
  std::vector<std::string> arguments_;
  pid_t pid_ = -1;
};

// kvqd's command line for these settings, after its file is written: lines that begin with "--" are arguments.
std::vector<std::string> kvqd_arguments(const std::string& directory, const std::string& settings);

// The GPU worker of that kvqd, the only child that it has; 0 while there is none.
pid_t worker_of(pid_t daemon);

// Arena of 16 slabs of 256 KiB; a page of tiny_geometry() takes 32 KiB dense, 9 KiB as int4. All watermarks out of the
// way: nothing is quantized or dropped unless a test's own settings say so.
std::string calm_settings();

}  // namespace kvq::test

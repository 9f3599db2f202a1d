// Error values: what a caller can act on. Bugs assert instead, and stay asserted in release builds.
//
// Invariant: a Result holds a value exactly when its code is Errc::ok; `context` is a static string, so that an error
// never allocates.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>

namespace kvq {

// Codes shared by the daemon, the wire and the C ABI (kvq.h repeats the numbers and asserts them). Never renumber.
enum class Errc : int {
  ok = 0,
  invalid_argument = 1,   // the call is wrong; the message names the value
  no_daemon = 2,          // nothing answers at the socket
  version_mismatch = 3,   // client and daemon speak different contract versions
  wrong_layout = 4,       // geometry or format not supported or not the registered one
  over_quota = 5,         // the tenant's quota would be exceeded
  no_memory = 6,          // no room before the deadline
  stale_id = 7,           // id of something that has ended
  lost_page = 8,          // the page's content is gone
  permission_denied = 9,  // not allowed for this peer
  limit_reached = 10,     // a bound of the contract (sequences, steps in flight, sessions)
  daemon_gone = 11,       // not back before the deadline, or started anew: then the session is lost
  forked = 12,            // the handle belongs to the parent process
  system = 13,            // the operating system refused; errno is in `native`
  draining = 14,          // the daemon admits nothing new
  context_lost = 15,      // GPU context is unusable, for good: start the process anew
};

struct Error {
  Errc code = Errc::ok;
  int native = 0;            // errno or driver code, 0 if none
  const char* context = "";  // static text: what was attempted
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT: implicit on purpose
  Result(Error error) : error_(error) {}         // NOLINT
  explicit operator bool() const { return value_.has_value(); }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  const Error& error() const { return error_; }

 private:
  std::optional<T> value_;
  Error error_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(error) {}  // NOLINT
  explicit operator bool() const { return error_.code == Errc::ok; }
  const Error& error() const { return error_; }

 private:
  Error error_;
};

[[noreturn]] inline void assertion_failed(const char* what, const char* file, int line) {
  std::fprintf(stderr, "kvq: assertion failed: %s (%s:%d)\n", what, file, line);
  std::abort();
}

}  // namespace kvq

#define KVQ_ASSERT(condition) \
  ((condition) ? static_cast<void>(0) : ::kvq::assertion_failed(#condition, __FILE__, __LINE__))

// Invariant: the buffer belongs to its thread and is always terminated.
#include "client/last_error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace kvq::client {
namespace {

constexpr std::size_t kTextBytes = 512;
thread_local char text[kTextBytes] = "";

static_assert(KVQ_ERR_INVALID_ARGUMENT == static_cast<int>(Errc::invalid_argument));
static_assert(KVQ_ERR_NO_DAEMON == static_cast<int>(Errc::no_daemon));
static_assert(KVQ_ERR_VERSION_MISMATCH == static_cast<int>(Errc::version_mismatch));
static_assert(KVQ_ERR_WRONG_LAYOUT == static_cast<int>(Errc::wrong_layout));
static_assert(KVQ_ERR_OVER_QUOTA == static_cast<int>(Errc::over_quota));
static_assert(KVQ_ERR_NO_MEMORY == static_cast<int>(Errc::no_memory));
static_assert(KVQ_ERR_STALE_ID == static_cast<int>(Errc::stale_id));
static_assert(KVQ_ERR_LOST_PAGE == static_cast<int>(Errc::lost_page));
static_assert(KVQ_ERR_PERMISSION_DENIED == static_cast<int>(Errc::permission_denied));
static_assert(KVQ_ERR_LIMIT_REACHED == static_cast<int>(Errc::limit_reached));
static_assert(KVQ_ERR_DAEMON_GONE == static_cast<int>(Errc::daemon_gone));
static_assert(KVQ_ERR_FORKED == static_cast<int>(Errc::forked));
static_assert(KVQ_ERR_SYSTEM == static_cast<int>(Errc::system));
static_assert(KVQ_ERR_DRAINING == static_cast<int>(Errc::draining));
static_assert(KVQ_ERR_CONTEXT_LOST == static_cast<int>(Errc::context_lost));

}  // namespace

kvq_status fail(kvq_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, kTextBytes, format, arguments);
  va_end(arguments);
  return status;
}

kvq_status fail(const Error& error) {
  const auto status = static_cast<kvq_status>(error.code);
  if (error.native == 0) return fail(status, "%s", error.context);
  return fail(status, "%s: %s", error.context, std::strerror(error.native));
}

const char* last_error() { return text; }

const char* status_name(kvq_status status) {
  switch (status) {
    case KVQ_OK:
      return "ok";
    case KVQ_ERR_INVALID_ARGUMENT:
      return "invalid_argument";
    case KVQ_ERR_NO_DAEMON:
      return "no_daemon";
    case KVQ_ERR_VERSION_MISMATCH:
      return "version_mismatch";
    case KVQ_ERR_WRONG_LAYOUT:
      return "wrong_layout";
    case KVQ_ERR_OVER_QUOTA:
      return "over_quota";
    case KVQ_ERR_NO_MEMORY:
      return "no_memory";
    case KVQ_ERR_STALE_ID:
      return "stale_id";
    case KVQ_ERR_LOST_PAGE:
      return "lost_page";
    case KVQ_ERR_PERMISSION_DENIED:
      return "permission_denied";
    case KVQ_ERR_LIMIT_REACHED:
      return "limit_reached";
    case KVQ_ERR_DAEMON_GONE:
      return "daemon_gone";
    case KVQ_ERR_FORKED:
      return "forked";
    case KVQ_ERR_SYSTEM:
      return "system";
    case KVQ_ERR_DRAINING:
      return "draining";
    case KVQ_ERR_CONTEXT_LOST:
      return "context_lost";
  }
  return "unknown";
}

}  // namespace kvq::client

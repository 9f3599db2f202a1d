// libsystemd's sd_notify; it is the only thing used of that library.
#include "daemon/notify.h"

#include <systemd/sd-daemon.h>

namespace kvq {

void notify_ready(const std::string& status) { sd_notifyf(0, "READY=1\nSTATUS=%s", status.c_str()); }
void notify_stopping() { sd_notify(0, "STOPPING=1"); }
void notify_alive() { sd_notify(0, "WATCHDOG=1"); }

std::uint64_t watchdog_ms() {
  std::uint64_t usec = 0;
  return sd_watchdog_enabled(0, &usec) > 0 ? usec / 1000 : 0;
}

}  // namespace kvq

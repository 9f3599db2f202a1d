// What kvqd tells its service manager, by the notify protocol.
//
// Invariant: without NOTIFY_SOCKET every call does nothing, so that kvqd runs the same from a shell.
#pragma once

#include <cstdint>
#include <string>

namespace kvq {

void notify_ready(const std::string& status);  // READY=1
void notify_stopping();                        // STOPPING=1
void notify_alive();                           // WATCHDOG=1

// How often the manager expects notify_alive(), 0: never.
std::uint64_t watchdog_ms();

}  // namespace kvq

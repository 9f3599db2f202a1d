// Which memory kvqd serves: this machine's, or that of GPUs by way of their workers.
//
// Invariant: start-up only, apart from the watch. What an earlier kvqd's workers may still write is over before
// anything is adopted. Whatever keeps an asked-for device from being had is one StartupError that names cause and fix;
// `auto` falls back to the host and says why in one line of the log.
#pragma once

#include "daemon/config.h"
#include "daemon/device/worker_link.h"
#include "daemon/event_loop.h"
#include "daemon/keeper.h"

namespace kvq {

struct DeviceParts {
  const Config& config;
  std::uint64_t most_slabs;  // that each arena may grow to
  RunBlocking run;           // for the host's jobs
  Store::LogDecision log;
  std::function<void()> pages_lost;  // from a tick: the pages of one device are gone, and it serves nothing more
};

// A GPU that was asked for and cannot be had.
struct DeviceRefused : StartupError {
  DeviceRefused(const std::string& text, bool no_device)
      : StartupError(ExitCode::environment, text), no_device(no_device) {}
  const bool no_device;  // there is no worker program, no driver or no such GPU
};

// Kills the workers that `kept` names, waits for their ends, and takes them out of there.
void end_earlier_workers(Kept& kept, ServiceKeeper& keeper);

struct DeviceChoice {
  std::vector<std::string> uuids;  // of GPUs; one that is empty: the host
  std::uint64_t most_bytes = 0;    // of one GPU, where that is known
  std::string why_host;            // in place of GPUs
};
// Throws DeviceRefused when there is nothing as asked for.
DeviceChoice choose_devices(const Config& config, const Kept& kept);

// Whether the host may serve in place of GPUs of which none can be had.
bool may_fall_back(const Config& config);

// Starts that GPU's worker and does not wait for what it says, so that the workers of several GPUs get ready at once.
// It can write to nothing yet, so nobody has to know of it. None for the host; why one cannot be started, make_device
// says.
WorkerLink start_worker(const Config& config, const std::string& uuid);

// The GPU of that UUID (throws DeviceRefused), empty: the host. `started` is taken, if there is one.
std::unique_ptr<Device> make_device(const DeviceParts& parts, const std::string& uuid, PartKeeper& keeper,
                                    const std::optional<KeptArena>& kept, WorkerLink& started);

// Calls `wake` when the device has something to say. Nothing, for one that says it by RunBlocking.
EventLoop::Watch watch_device(EventLoop& loop, const Device& device, std::function<void()> wake);

}  // namespace kvq

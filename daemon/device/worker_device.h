// The device whose memory and jobs are a worker process's: kvqd's side of daemon/gpu/worker_protocol.h.
//
// Invariant: before the loop runs, starting and adopting wait for the worker's answers, each for a bounded time; from
// the first advance() on no function waits for it. A worker that dies, says nothing for its deadline or reports a lost
// device is killed; only when the kernel says that it is gone are its jobs answered (with Errc::context_lost), and the
// next one adopts every slab and mirror by kvqd's own descriptors. Clients keep reading all the while. Where memory
// ends with its worker (gpu::Exporter::legacy) there is no next one: the device says that its pages are lost and serves
// nothing more.
#pragma once

#include <string>
#include <vector>

#include "daemon/device/device.h"
#include "daemon/device/worker_link.h"

namespace kvq {

struct WorkerOptions {
  std::vector<std::string> command;  // path of the worker program, and its arguments
  std::string uuid;                  // of the GPU; empty: whichever the worker chooses
  std::uint64_t slab_bytes = 0;
  std::uint64_t arena_bytes = 0;          // asked for; fewer slabs if the GPU has no room
  double arena_share = 0;                 // in place of arena_bytes: of the GPU's memory
  std::uint64_t kept_arena_bytes = 0;     // the range of an earlier kvqd whose slabs will be adopted; 0: none
  std::uint64_t most_bytes = UINT64_MAX;  // that the arena may grow to, if the GPU has that much
  std::uint32_t least_slabs = 2;          // with fewer it does not start
  std::uint32_t deadline_ms = 10'000;     // longest that the worker's loop may stand still
  std::uint32_t start_ms = 30'000;        // longest that a worker may take until it serves
  std::uint32_t first_pause_ms = 200, longest_pause_ms = 10'000;  // before a worker is started again
  std::function<void(int pidfd)> keep_worker = [](int) {};        // whoever starts next must end it first
  std::function<void(const std::string& line)> log = [](const std::string&) {};
  std::function<void()> pages_lost = [] {};  // from advance(), once: the pages ended with their worker
};

struct MadeWorkerDevice {
  std::unique_ptr<Device> device;  // null: `why_not` says cause and fix
  std::string why_not;
  std::string warning;     // it serves, but not as asked
  std::string gpu;         // its name, for people
  bool in_mps = false;     // the worker is, which chooses its pace
  bool no_device = false;  // why_not: there is no worker program, no driver or no GPU to work with
};

// `started`: the first worker, where it runs already.
MadeWorkerDevice make_worker_device(WorkerOptions options, WorkerLink started = {});

}  // namespace kvq

// A "GPU" whose memory is memory files: slabs and mirrors are memfds, jobs run the host kernels. It misbehaves on
// request.
//
// Invariant: as the Backend demands, apart from the faults that it was told. Writes to mirrors and results of jobs
// appear only when their delay is over, in order, so whoever counts on them too early is seen to. A legacy one keeps
// one file for each place of the arena, which stand for parts of one allocation.
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <string>

#include "daemon/gpu/backend.h"

namespace kvq::testing {

struct GpuFaults {
  std::uint64_t slow_us = 0, slow_writes_us = 0;                       // each job, each batch of entries
  std::uint64_t fail_every = 0;                                        // each n-th job fails with Errc::system
  std::uint64_t slabs = UINT64_MAX;                                    // more do not fit
  std::uint64_t mirrors = UINT64_MAX;                                  // likewise
  std::uint64_t die_at_job = 0, die_at_entry = 0, die_at_call = 0;     // SIGKILL at the n-th
  std::uint64_t hang_at_job = 0, hang_at_entry = 0, hang_at_call = 0;  // does not come back from the n-th
  std::uint64_t lose_at_job = 0;                                       // the context is lost with the n-th
  std::uint64_t refuse_slab = UINT64_MAX, refuse_mirror = UINT64_MAX;  // cannot be adopted
  std::uint64_t no_room_for_slab = UINT64_MAX;  // cannot be mapped by this worker, which has no room
  bool legacy = false;  // memory as a legacy exporter has it: one spare for each place, and nothing outlives the worker
  bool no_vmm = false;  // it can have it in no other way
  bool paced = false;   // a pace whose pause never ends: jobs run only while somebody waits for memory
  std::string uuid = "GPU-00000000-0000-0000-0000-000000000000";
  std::uint64_t total_bytes = std::uint64_t{1} << 30;
  std::string no_gpu;  // there is none, and why
  std::string once;    // a file: made by the first fault that ends or hangs a worker, and while it is there none does
};

// "slow_us=100,die_at_job=3"; throws std::invalid_argument for what it does not know.
GpuFaults parse_faults(const std::string& text);

std::unique_ptr<gpu::Backend> make_memory_backend(const GpuFaults& faults);

}  // namespace kvq::testing

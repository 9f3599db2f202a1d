// Which GPUs there are, as the worker program says: kvqd itself knows no driver.
//
// Invariant: start-up only. The program runs once, for a bounded time, and is gone or killed on return.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

struct GpuList {
  std::vector<std::string> uuids;  // in the driver's order
  std::uint64_t most_bytes = 0;    // of memory on one of them
  std::string why_not;             // names cause and fix when there is none
};

// Runs `program` --list: a line "UUID NAME TOTAL_BYTES FREE_BYTES" for each GPU; whatever else it says is a reason.
GpuList list_gpus(const std::string& program, int most_ms);

// The same from what it said; `ended`: how, for the reason.
GpuList read_gpu_list(const std::string& text, const std::string& program, const std::string& ended);

}  // namespace kvq

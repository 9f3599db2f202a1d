// What kvqd needs of the machine, checked once at start-up so that it does not fail in the middle of serving.
//
// Invariant: the check_ functions are pure: they see numbers and answer with a line that names what is there, what is
// needed and the fix, or with nothing. check_environment reads the numbers, raises what may be raised, and throws.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/exit_code.h"

namespace kvq {

struct Needs {
  std::uint64_t devices = 1;
  bool gpus = false;  // devices are GPUs, each with a worker and a mirror of every tenant's directory
  std::uint64_t arena_bytes = 0;
  std::uint64_t slabs = 0;  // of one device
  std::uint64_t sessions = 0;
  std::uint64_t tenants = 0;  // likewise
  bool lock_memory = false;
  bool kept = false;              // state is kept for the next daemon
  std::string runtime_directory;  // of the socket and its lock file
};

// Descriptors kvqd holds when everything it may hold is held.
std::uint64_t descriptors_needed(const Needs& needs);

// What bounds an arena that grows.
struct Room {
  std::uint64_t memory_bytes = 0;  // of the machine or the control group; 0: unknown
  std::uint64_t descriptors = 0;   // the hard limit
  bool fixed = false;              // addresses or lockable memory are limited: what is only reserved counts, too
};
Room read_room(const Needs& needs);

// How many slabs the arena of each device may grow to: those of the start at least, and 64 times as many at most.
std::uint64_t most_slabs(const Needs& needs, const Room& room);

// Descriptors that a service manager holds for the next daemon: FileDescriptorStoreMax= must allow them.
std::uint64_t kept_needed(const Needs& needs);

struct Limit {
  std::uint64_t soft = 0;
  std::uint64_t hard = 0;
};

using Problem = std::optional<std::string>;

// For a warning: more descriptors than a service manager can name to the next daemon.
Problem check_kept(std::uint64_t kept);

// Refused only when even the hard limit is too low: the soft one is raised.
Problem check_descriptors(std::uint64_t needed, Limit descriptors);

// `limit_bytes` is the lower of the machine's memory and the control group's limit, `limit_name` says which.
Problem check_memory(std::uint64_t arena_bytes, std::uint64_t limit_bytes, std::string_view limit_name);

// For a warning: pages that cannot be locked may be swapped, which is slow and still right.
Problem check_lockable(std::uint64_t arena_bytes, Limit locked_bytes);

struct Processor {
  std::string architecture;  // as uname says
  bool little_endian = true;
  bool vectors = true;                           // SSSE3 on x86_64: the least that kernels are compiled for
  bool avx2 = false, f16c = false, fma = false;  // false where they do not exist
};

// Refused: what the shared layouts or kernels cannot run on. `slow` gets a warning for what they run on, but slowly.
Problem check_processor(const Processor& processor, Problem& slow);

// "MemTotal" of /proc/meminfo's text in bytes; 0 when absent.
std::uint64_t parse_memory_total(std::string_view meminfo);

// The number in a control group's memory.max or memory.limit_in_bytes; empty for "max" or anything else.
std::optional<std::uint64_t> parse_group_limit(std::string_view text);

// Path below the control group mount for the memory controller, from /proc/self/cgroup's text: the file to read.
std::vector<std::string> group_limit_files(std::string_view self_cgroup);

// Exists, is a directory, and this process may create files in it.
Problem check_directory(const std::string& directory);

// A sealed memfd can be made.
Problem check_memfd();

// Runs all checks, raises the soft descriptor limit (for a grown arena too, where the hard one allows it), locks memory
// if asked. Throws StartupError{environment} for the
// first thing that makes serving impossible; returns warnings, one line each.
std::vector<std::string> check_environment(const Needs& needs);

}  // namespace kvq

// What an operator can set, with units and defaults; read once at start-up from the command line and a TOML file.
//
// Invariant: a Config that parse_command_line returns is consistent: every value in range, watermarks ordered, slabs
// dividing the arena, tenants distinct. The command line wins over the file, the file over the defaults below. Exit
// codes are in exit_code.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "daemon/exit_code.h"
#include "kvq/types.h"

namespace kvq {

// Fractions of the arena in use. A level begins at its mark and ends when use has fallen `relief` below it.
struct WatermarkConfig {
  double quantize_at = 0.70;
  double evict_at = 0.85;
  double refuse_at = 0.95;
  double relief = 0.05;
};

// A peer belongs to the first tenant that lists its uid, else to the first that lists one of its gids.
struct TenantConfig {
  std::string name;                 // 1 to 32 of a-z 0-9 - _
  std::vector<std::uint32_t> uids;  // as the kernel reports them for the peer's socket
  std::vector<std::uint32_t> gids;
  std::uint64_t quota_bytes = 0;       // most bytes charged to it; 0: the arena, as large as it is
  std::uint32_t share = 1;             // weight among tenants: who is furthest over its share pays first
  Format format_floor = Format::int4;  // dense: its pages are never quantized
  std::string salt;                    // bytes mixed into its prefix keys; empty: a random one at start-up
};

// automatic: a GPU if there is one to work with, else the host.
enum class DeviceKind : std::uint8_t { automatic, host, cuda };

// Where metrics are served: a Unix socket's path, or a loopback port; neither: nowhere.
struct MetricsAddress {
  std::string path;
  std::string host;  // 127.0.0.1 or ::1
  std::uint16_t port = 0;
  bool off() const { return path.empty() && port == 0; }
};

struct Config {
  std::string path;                       // of the file, absolute; empty: there is none
  std::vector<std::string> command_line;  // options and values, as given
  std::string socket = "/run/kvq/kvqd.sock";
  std::string socket_group;  // group that may connect; empty: only the daemon's user and root
  DeviceKind device = DeviceKind::host;
  std::vector<std::string> device_uuids;   // of the GPUs to serve; empty: all that the worker sees
  std::string gpu_export = "auto";         // how the worker passes memory on: vmm, legacy, auto (vmm where possible)
  std::uint64_t arena_bytes = 4ull << 30;  // all pages of all tenants on one device
  std::uint32_t arena_percent = 0;         // on a GPU, in place of arena_bytes: of its memory; 0: arena_bytes holds
  std::uint64_t slab_bytes = 64ull << 20;  // unit of mapping and of giving memory to a tenant
  std::uint64_t gpu_slab_bytes = 256ull << 20;  // the same on a GPU: slab_bytes, when that is given
  std::uint32_t max_pages = 1u << 20;           // page ids per tenant: the size of its directory
  std::uint32_t max_sessions = 64;              // connected processes
  WatermarkConfig watermarks;
  std::uint32_t residual_window_pages = 4;  // newest pages of a running sequence that stay dense
  std::uint32_t step_deadline_ms = 30'000;  // past it an unended step costs its tenant new pages
  Format cold_format = Format::int4;        // what quantizing makes of a dense page
  std::string admin_group;                  // group of operators; empty: only root and the daemon's user
  MetricsAddress metrics;
  std::string log_level = "info";  // trace, debug, info, warn, error, off
  bool lock_memory = false;        // keep pages out of swap (needs RLIMIT_MEMLOCK)
  std::vector<TenantConfig> tenants;
  bool allow_unlisted = true;              // a peer of no tenant gets one of its own, by uid
  std::uint64_t unlisted_quota_bytes = 0;  // quota of such a tenant; 0: the arena, as large as it is

  // For tests, from the command line alone.
  std::string gpu_worker;                     // program; empty: kvqd-gpu beside kvqd, else where the build installs it
  std::uint32_t worker_deadline_ms = 10'000;  // a GPU worker that stands still for longer is killed and started anew

  std::map<std::string, std::string> given;  // what the file or the command line sets, as written there
};

inline constexpr std::uint32_t kReserveSlabs = 1;  // only transcodes may take these: making room takes room

// `config` is set when the daemon shall start. Otherwise `message` goes to stdout when `exit_code` is ok (help,
// version, "configuration ok"), else to stderr: one line with the place, the key, its value and the fix.
struct CommandLine {
  std::optional<Config> config;
  ExitCode exit_code = ExitCode::ok;
  std::string message;
};

CommandLine parse_command_line(int argc, const char* const* argv);

}  // namespace kvq

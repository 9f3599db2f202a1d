// A worker for each GPU. Its pidfd is kept like the rest of its device.
#include "daemon/choose_device.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <filesystem>

#include "daemon/device/worker_device.h"
#include "daemon/device/worker_process.h"
#include "daemon/gpu_list.h"
#include "kvq/directory.h"

#ifndef KVQ_WORKER_DIRECTORY
#error "KVQ_WORKER_DIRECTORY is where the build installs kvqd-gpu"
#endif

namespace kvq {
namespace {

constexpr char kWorkerName[] = "kvq-worker";  // its pidfd, at the keeper
constexpr int kEndMs = 30'000;                // longest that an earlier worker may take to end
constexpr int kListMs = 60'000;               // longest that the worker program may look for GPUs: it wakes each up

std::string worker_program(const Config& config) {
  if (!config.gpu_worker.empty()) return config.gpu_worker;
  std::error_code unknown;
  const auto here = std::filesystem::read_symlink("/proc/self/exe", unknown).parent_path() / "kvqd-gpu";
  if (std::filesystem::exists(here, unknown)) return here.string();
  return std::string(KVQ_WORKER_DIRECTORY) + "/kvqd-gpu";
}

std::vector<std::string> worker_command(const Config& config, const std::string& uuid) {
  return {worker_program(config), "--uuid", uuid, "--export", config.gpu_export};
}

// The range of an arena that was left, so that its slabs keep their places; 0: there is none that can be had.
std::uint64_t kept_range(const std::optional<KeptArena>& kept, std::uint64_t slab_bytes) {
  if (!kept || kept->slab_bytes != slab_bytes || kept->most_bytes % slab_bytes != 0) return 0;
  return kept->most_bytes / kOffsetUnitBytes <= kOffsetMask ? kept->most_bytes : 0;
}

}  // namespace

void end_earlier_workers(Kept& kept, ServiceKeeper& keeper) {
  for (auto it = kept.begin(); it != kept.end();) {
    const std::string& name = it->first;
    if (name.substr(prefix_of(name).size()) != std::string(kWorkerName).substr(kept_prefix("").size())) {
      ++it;
      continue;
    }
    if (!end_process(it->second.get(), kEndMs)) {
      throw StartupError(ExitCode::environment,
                         "the GPU worker of an earlier kvqd does not end, and may write to what would be adopted; its "
                         "driver hangs: reset the GPU or restart the machine");
    }
    keeper.forget(name);
    it = kept.erase(it);
  }
}

bool may_fall_back(const Config& config) { return config.device == DeviceKind::automatic && config.arena_percent == 0; }

DeviceChoice choose_devices(const Config& config, const Kept& kept) {
  const DeviceChoice host{{""}, 0, ""};
  if (config.device == DeviceKind::host) return host;
  if (!config.device_uuids.empty()) return {config.device_uuids, 0, ""};
  const auto left = kept_arena(kept);
  if (config.device == DeviceKind::automatic && left && left->device == "host") return host;  // goes on where it was
  GpuList gpus = list_gpus(worker_program(config), kListMs);
  if (!gpus.uuids.empty()) return {std::move(gpus.uuids), gpus.most_bytes, ""};
  if (may_fall_back(config)) return {{""}, 0, gpus.why_not};
  const std::string asked = config.device == DeviceKind::automatic ? "auto" : "cuda";
  throw DeviceRefused("device = " + asked + ": " + gpus.why_not, /*no_device=*/true);
}

WorkerLink start_worker(const Config& config, const std::string& uuid) {
  if (uuid.empty()) return {};
  Result<WorkerLink> link = WorkerLink::start(worker_command(config, uuid));
  return link ? std::move(*link) : WorkerLink();
}

std::unique_ptr<Device> make_device(const DeviceParts& parts, const std::string& uuid, PartKeeper& keeper,
                                    const std::optional<KeptArena>& kept, WorkerLink& started) {
  const Config& config = parts.config;
  if (uuid.empty()) {
    const std::uint64_t range = kept_range(kept, config.slab_bytes);
    return make_host_device(config.arena_bytes, config.slab_bytes, parts.run,
                            range != 0 ? range : parts.most_slabs * config.slab_bytes);
  }
  MadeWorkerDevice made = make_worker_device({.command = worker_command(config, uuid),
                                              .uuid = uuid,
                                              .slab_bytes = config.gpu_slab_bytes,
                                              .arena_bytes = config.arena_bytes,
                                              .arena_share = config.arena_percent / 100.0,
                                              .kept_arena_bytes = kept_range(kept, config.gpu_slab_bytes),
                                              .most_bytes = parts.most_slabs * config.gpu_slab_bytes,
                                              .least_slabs = kReserveSlabs + 1,
                                              .deadline_ms = config.worker_deadline_ms,
                                              .keep_worker = [&keeper](int pidfd) { keeper.keep(kWorkerName, pidfd); },
                                              .log = parts.log,
                                              .pages_lost = parts.pages_lost},
                                             std::move(started));
  if (made.device == nullptr) throw DeviceRefused("device = " + uuid + ": " + made.why_not, made.no_device);
  if (!made.warning.empty()) parts.log("event=warning text=\"" + made.warning + "\"");
  const DeviceHealth health = made.device->health();
  if (!made.device->can_adopt()) {
    parts.log("event=warning text=\"" + health.uuid +
              " passes its memory on by legacy handles: clients map the whole arena for writing, so nothing guards "
              "sealed pages or one tenant from another, and pages do not outlive the GPU worker or kvqd\"");
  }
  parts.log("event=device device=" + made.device->name() + " uuid=" + health.uuid + " gpu=\"" + made.gpu +
            "\" export=" + health.exporter + " mps=" + (made.in_mps ? "yes" : "no") +
            " overhead_bytes=" + std::to_string(health.overhead_bytes));
  return std::move(made.device);
}

EventLoop::Watch watch_device(EventLoop& loop, const Device& device, std::function<void()> wake) {
  const int fd = device.wake_descriptor();
  if (fd < 0) return {};
  return loop.on_readable(fd, [fd, wake = std::move(wake)] {
    std::array<epoll_event, 8> events;  // an epoll set: looked at, it is quiet until something new happens
    ::epoll_wait(fd, events.data(), static_cast<int>(events.size()), 0);
    wake();
  });
}

}  // namespace kvq

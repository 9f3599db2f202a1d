// Invariant: the device maps and unmaps whole slabs, each under the mutex, and forgets none that is in slabs_.
#include "client/tenant_memory.h"

#include <algorithm>
#include <atomic>
#include <tuple>
#include <utility>

#include "client/fork_guard.h"
#include "client/last_error.h"
#include "kvq/step_protocol.h"

namespace kvq::client {
namespace {

using RegistryKey = std::tuple<std::uint64_t, std::uint32_t, std::string>;  // daemon instance, tenant, device

struct Registry {
  const std::uint64_t generation = fork_generation();
  std::mutex mutex;
  std::map<RegistryKey, std::weak_ptr<TenantMemory>> memories;
};

// A child of fork() starts a registry of its own: it inherited no mapping, and the parent's mutex may have been held.
// The parent's copy is left alone, which leaks a few bytes in the child.
Registry& registry() {
  static std::atomic<Registry*> current{nullptr};
  Registry* found = current.load(std::memory_order_acquire);
  while (found == nullptr || found->generation != fork_generation()) {
    auto made = std::make_unique<Registry>();
    if (current.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) return *made.release();
  }
  return *found;
}

}  // namespace

std::shared_ptr<TenantMemory> TenantMemory::of(const Shape& shape) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& known = all.memories[{shape.daemon_instance, raw(shape.tenant), shape.device_uuid}];
  if (auto memory = known.lock()) return memory;
  auto memory = std::make_shared<TenantMemory>(shape);
  known = memory;
  return memory;
}

TenantMemory::TenantMemory(const Shape& shape)
    : shape_(shape),
      device_(shape.device_uuid.empty() ? make_host_side(shape.arena_bytes, shape.slab_bytes)
                                        : make_cuda_side(shape.arena_bytes, shape.slab_bytes, shape.device_uuid)) {}

kvq_status TenantMemory::open_device() {
  const std::lock_guard lock(mutex_);
  return device_->open();
}

kvq_status TenantMemory::map_mirror(int fd) {
  const std::lock_guard lock(mutex_);
  return device_->map_mirror(fd, shape_.mirror_bytes);
}

bool TenantMemory::ends_with_daemon() const {
  const std::lock_guard lock(mutex_);
  return device_->ends_with_daemon();
}

kvq_status TenantMemory::map_tables(int directory_fd, int prefix_fd) {
  const std::lock_guard lock(mutex_);
  if (prefix_ != nullptr) return KVQ_OK;
  std::unique_ptr<MappedFile> directory, prefix;
  if (auto s = map_directory(directory_fd, shape_.tenant, shape_.arena_bytes, shape_.slab_bytes, directory);
      s != KVQ_OK)
    return s;
  const std::uint64_t buckets = reinterpret_cast<const DirectoryHeader*>(directory->data())->prefix_buckets;
  if (auto s = map_prefix_table(prefix_fd, shape_.tenant, buckets, prefix); s != KVQ_OK) return s;
  directory_ = std::move(directory);
  prefix_ = std::move(prefix);
  return KVQ_OK;
}

kvq_status TenantMemory::map_slab(SessionId session, SlabId slab, int fd, std::uint64_t serial, bool writable) {
  const std::lock_guard lock(mutex_);
  if (raw(slab) >= shape_.arena_bytes / shape_.slab_bytes) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "kvqd named slab %u, the arena has %llu", raw(slab),
                static_cast<unsigned long long>(shape_.arena_bytes / shape_.slab_bytes));
  }
  const auto known = slabs_.find(raw(slab));
  if (known != slabs_.end() && known->second.serial == serial) {
    if (known->second.writable != writable) {
      return fail(KVQ_ERR_SYSTEM,
                  "slab %u is mapped %s and asked for %s: it was not unmapped before its layout changed", raw(slab),
                  writable ? "read-only" : "writable", writable ? "writable" : "read-only");
    }
    known->second.sessions.insert(raw(session));
    return KVQ_OK;
  }
  if (auto s = device_->map(raw(slab), fd, writable); s != KVQ_OK) return s;
  slabs_[raw(slab)] = Slab{.writable = writable, .serial = serial, .sessions = {raw(session)}};
  return KVQ_OK;
}

void TenantMemory::remove_user(std::map<std::uint32_t, Slab>::iterator slab, SessionId session) {
  if (slab->second.sessions.erase(raw(session)) == 0 || !slab->second.sessions.empty()) return;
  device_->unmap(slab->first);
  slabs_.erase(slab);
}

void TenantMemory::unmap_slab(SessionId session, SlabId slab) {
  const std::lock_guard lock(mutex_);
  if (auto known = slabs_.find(raw(slab)); known != slabs_.end()) remove_user(known, session);
}

void TenantMemory::forget_session(SessionId session) {
  const std::lock_guard lock(mutex_);
  for (auto slab = slabs_.begin(); slab != slabs_.end();) remove_user(slab++, session);
}

void TenantMemory::watch(SessionId session, const Segment& segment) {
  const std::lock_guard lock(mutex_);
  watched_[raw(session)] = segment.step;
}

void TenantMemory::unwatch(SessionId session) {
  const std::lock_guard lock(mutex_);
  watched_.erase(raw(session));
}

std::vector<TenantMemory::OpenStep> TenantMemory::open_steps() const {
  const std::lock_guard lock(mutex_);
  std::vector<OpenStep> steps;
  for (const auto& [session, slots] : watched_) {
    for (std::uint32_t i = 0; i < kStepSlots; ++i) {
      const std::uint64_t begun = slots[i].begun.load(std::memory_order_relaxed);
      if (is_open<SharedMemory>(slots[i])) steps.push_back({SessionId{session}, i, begun});
    }
  }
  return steps;
}

bool TenantMemory::all_over(const std::vector<OpenStep>& steps) const {
  const std::lock_guard lock(mutex_);
  return std::all_of(steps.begin(), steps.end(), [this](const OpenStep& step) {
    const auto session = watched_.find(raw(step.session));
    return session == watched_.end() || step_ended<SharedMemory>(session->second[step.slot], step.serial);
  });
}

kvq_status TenantMemory::make_model_side(Segment& segment, std::unique_ptr<ModelSide>& out) {
  return device_->make_model_side(segment, out);
}

std::size_t TenantMemory::mapped_slabs() const {
  const std::lock_guard lock(mutex_);
  return slabs_.size();
}

}  // namespace kvq::client

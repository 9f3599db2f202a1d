// Invariant: the arena's address range is reserved once as PROT_NONE; mmap(MAP_FIXED) only ever replaces whole slabs
// inside it.
#include "client/tenant_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "client/fork_guard.h"
#include "client/last_error.h"
#include "kvq/result.h"

namespace kvq::client {
namespace {

using RegistryKey = std::pair<std::uint64_t, std::uint32_t>;  // daemon instance, tenant

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
  auto& known = all.memories[{shape.daemon_instance, raw(shape.tenant)}];
  if (auto memory = known.lock()) return memory;
  auto memory = std::make_shared<TenantMemory>(shape);
  known = memory;
  return memory;
}

TenantMemory::~TenantMemory() {
  if (std::byte* base = arena(); base != nullptr) ::munmap(base, shape_.arena_bytes);
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

kvq_status TenantMemory::reserve_arena() {
  void* base = ::mmap(nullptr, shape_.arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return fail(KVQ_ERR_SYSTEM, "reserving %llu bytes of address space for the arena: %s; raise the limit (ulimit -v)",
                static_cast<unsigned long long>(shape_.arena_bytes), std::strerror(errno));
  }
  ::madvise(base, shape_.arena_bytes, MADV_DONTFORK);
  arena_.store(static_cast<std::byte*>(base), std::memory_order_release);
  return KVQ_OK;
}

kvq_status TenantMemory::map_slab(SessionId session, SlabId slab, int fd, bool writable) {
  const std::lock_guard lock(mutex_);
  if (raw(slab) >= shape_.arena_bytes / shape_.slab_bytes) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "kvqd named slab %u, the arena has %llu", raw(slab),
                static_cast<unsigned long long>(shape_.arena_bytes / shape_.slab_bytes));
  }
  if (arena() == nullptr) {
    if (auto s = reserve_arena(); s != KVQ_OK) return s;
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0 || static_cast<std::uint64_t>(info.st_size) < shape_.slab_bytes) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "slab %u has %lld bytes, expected %llu", raw(slab),
                static_cast<long long>(info.st_size), static_cast<unsigned long long>(shape_.slab_bytes));
  }
  const auto known = slabs_.find(raw(slab));
  if (known != slabs_.end() && known->second.file == info.st_ino) {
    if (known->second.writable != writable) {
      return fail(KVQ_ERR_SYSTEM,
                  "slab %u is mapped %s and asked for %s: it was not unmapped before its layout changed", raw(slab),
                  writable ? "read-only" : "writable", writable ? "writable" : "read-only");
    }
    known->second.sessions.insert(raw(session));
    return KVQ_OK;
  }
  std::byte* place = arena() + raw(slab) * shape_.slab_bytes;
  if (::mmap(place, shape_.slab_bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) ==
      MAP_FAILED) {
    return fail(KVQ_ERR_SYSTEM, "mapping slab %u: %s; check vm.max_map_count", raw(slab), std::strerror(errno));
  }
  ::madvise(place, shape_.slab_bytes, MADV_DONTFORK);
  slabs_[raw(slab)] = Slab{.writable = writable, .file = info.st_ino, .sessions = {raw(session)}};
  return KVQ_OK;
}

void TenantMemory::remove_user(std::map<std::uint32_t, Slab>::iterator slab, SessionId session) {
  if (slab->second.sessions.erase(raw(session)) == 0 || !slab->second.sessions.empty()) return;
  std::byte* place = arena() + slab->first * shape_.slab_bytes;
  void* hole =
      ::mmap(place, shape_.slab_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  KVQ_ASSERT(hole == place);
  ::madvise(place, shape_.slab_bytes, MADV_DONTFORK);
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

std::size_t TenantMemory::mapped_slabs() const {
  const std::lock_guard lock(mutex_);
  return slabs_.size();
}

}  // namespace kvq::client

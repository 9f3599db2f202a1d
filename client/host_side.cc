// The host device: slabs are memfds, kernels are calls that have returned when their work is done.
//
// Invariant: the arena's address range is reserved once as PROT_NONE; mmap(MAP_FIXED) only ever replaces whole slabs
// inside it. A child of fork() inherits none of it.
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "client/device.h"
#include "client/last_error.h"
#include "kvq/result.h"
#include "kvq/step_protocol.h"

namespace kvq::client {
namespace {

constexpr std::int64_t kTokensPerPage = KVQ_PAGE_TOKENS;

kvq_status in_layer(const char* call, std::uint32_t layer, const Error& error) {
  return fail(static_cast<kvq_status>(error.code), "%s, layer %u: %s", call, layer, error.context);
}

int cpus() {
  cpu_set_t set;
  const int count = ::sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  return std::clamp(count, 1, kMaxThreads);
}

std::int64_t pages_of(std::int32_t tokens) { return (std::max(tokens, 0) + kTokensPerPage - 1) / kTokensPerPage; }

// The block tables of a call with aliases as page ids, rows of `stride` entries, in this thread's scratch memory.
kvq_status translate_tables(const kvq_attend_args& args, const Aliases& aliases, std::vector<std::int32_t>& out,
                            std::int64_t& stride) {
  if (args.batch != 0 && (args.block_table == nullptr || args.seq_lengths == nullptr)) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_attend, layer %u: block_table or seq_lengths is NULL", args.layer);
  }
  stride = 0;
  for (std::uint32_t b = 0; b < args.batch; ++b) stride = std::max(stride, pages_of(args.seq_lengths[b]));
  if (stride > args.block_table_stride && args.batch > 1) {
    return fail(KVQ_ERR_INVALID_ARGUMENT,
                "kvq_attend, layer %u: a sequence needs %lld pages, block_table_stride is %lld", args.layer,
                static_cast<long long>(stride), static_cast<long long>(args.block_table_stride));
  }
  out.resize(static_cast<std::size_t>(args.batch) * static_cast<std::size_t>(stride));
  for (std::uint32_t b = 0; b < args.batch; ++b) {
    aliases.translate_row(args.block_table + b * args.block_table_stride,
                          static_cast<std::size_t>(pages_of(args.seq_lengths[b])), out.data() + b * stride);
  }
  return KVQ_OK;
}

class HostModelSide final : public ModelSide {
 public:
  explicit HostModelSide(const DeviceSide* device) : device_(device) {}  // null: nothing is copied

  kvq_status end_step(StepSlot& slot, std::uint64_t serial, void* stream) override {
    if (stream != nullptr)
      return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_step_end: stream must be NULL on the host device");
    kvq::end_step<SharedMemory>(slot, serial);
    return KVQ_OK;
  }

  kvq_status append(AppendCall call, const kvq_append_args& args, const Aliases& aliases) override {
    thread_local std::vector<std::int64_t> translated;
    if (args.slots_are_aliases != 0) {
      translated.resize(args.tokens);
      aliases.translate_slots(args.slots, args.tokens, translated.data());
      call.slots = translated.data();
    }
    const auto done = kvq::append(call);
    return done ? KVQ_OK : in_layer("kvq_append", args.layer, done.error());
  }

  kvq_status attend(AttentionCall call, const kvq_attend_args& args, const Aliases& aliases) override {
    thread_local std::vector<std::int32_t> translated;
    if (args.table_has_aliases != 0) {
      if (auto s = translate_tables(args, aliases, translated, call.block_table_stride); s != KVQ_OK) return s;
      call.block_tables = translated.data();
    }
    call.threads = args.threads == 0 ? cpus() : static_cast<int>(std::min<std::uint32_t>(args.threads, kMaxThreads));
    const auto done = kvq::attend(call);
    return done ? KVQ_OK : in_layer("kvq_attend", args.layer, done.error());
  }

  kvq_status merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                   std::uint32_t head_dim, void* stream) override {
    if (stream != nullptr)
      return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_merge_states_on: stream must be NULL on the host device");
    return kvq_merge_states(out_a, lse_a, out_b, lse_b, rows, head_dim);
  }

  kvq_status copy_page(const ModelView& model, const PageCopy& copy) override {
    std::byte* base = device_->arena();
    const auto done =
        transcode_page(*model.geometry, copy.from, base + copy.source_bytes, copy.to, base + copy.destination_bytes);
    if (done) return KVQ_OK;
    return fail(static_cast<kvq_status>(done.error().code), "copying page %u: %s", raw(copy.page),
                done.error().context);
  }

  kvq_status show_aliases(const kvq_alias*, std::size_t, void* stream) override {
    if (stream == nullptr) return KVQ_OK;  // calls translate them by the table itself
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_set_aliases_on: stream must be NULL on the host device");
  }
  kvq_status show_aliases_now(const kvq_alias*, std::size_t) override { return KVQ_OK; }
  kvq_status workspace_bytes(const ModelView&, std::uint32_t, std::size_t& bytes) override {
    bytes = 0;
    return KVQ_OK;
  }
  void take_fault(kvq_fault&) override {}
  kvq_status check_context() override { return KVQ_OK; }
  kvq_status ask_context() override { return KVQ_OK; }

 private:
  const DeviceSide* const device_;
};

class HostSide final : public DeviceSide {
 public:
  HostSide(std::uint64_t arena_bytes, std::uint64_t slab_bytes) : arena_bytes_(arena_bytes), slab_bytes_(slab_bytes) {}
  ~HostSide() override {
    if (std::byte* base = arena(); base != nullptr) ::munmap(base, arena_bytes_);
  }

  kvq_status open() override { return KVQ_OK; }

  kvq_status map(std::uint32_t slab, int fd, bool writable) override {
    struct stat info {};
    if (::fstat(fd, &info) != 0 || static_cast<std::uint64_t>(info.st_size) < slab_bytes_) {
      return fail(KVQ_ERR_VERSION_MISMATCH, "slab %u has %lld bytes, expected %llu", slab,
                  static_cast<long long>(info.st_size), static_cast<unsigned long long>(slab_bytes_));
    }
    if (arena() == nullptr) {
      if (auto s = reserve(); s != KVQ_OK) return s;
    }
    std::byte* place = arena() + slab * slab_bytes_;
    if (::mmap(place, slab_bytes_, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) ==
        MAP_FAILED) {
      return fail(KVQ_ERR_SYSTEM, "mapping slab %u: %s; check vm.max_map_count", slab, std::strerror(errno));
    }
    ::madvise(place, slab_bytes_, MADV_DONTFORK);
    return KVQ_OK;
  }

  void unmap(std::uint32_t slab) override {
    std::byte* place = arena() + slab * slab_bytes_;
    void* hole = ::mmap(place, slab_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    KVQ_ASSERT(hole == place);
    ::madvise(place, slab_bytes_, MADV_DONTFORK);
  }

  kvq_status map_mirror(int, std::uint64_t) override { return KVQ_OK; }
  std::byte* arena() const override { return arena_.load(std::memory_order_acquire); }
  const DirectoryEntry* mirror() const override { return nullptr; }
  kvq_status make_model_side(Segment&, std::unique_ptr<ModelSide>& out) override {
    out = std::make_unique<HostModelSide>(this);
    return KVQ_OK;
  }

 private:
  kvq_status reserve() {
    void* base = ::mmap(nullptr, arena_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
      return fail(KVQ_ERR_SYSTEM,
                  "reserving %llu bytes of address space for the arena: %s; raise the limit (ulimit -v)",
                  static_cast<unsigned long long>(arena_bytes_), std::strerror(errno));
    }
    ::madvise(base, arena_bytes_, MADV_DONTFORK);
    arena_.store(static_cast<std::byte*>(base), std::memory_order_release);
    return KVQ_OK;
  }

  const std::uint64_t arena_bytes_, slab_bytes_;
  std::atomic<std::byte*> arena_{nullptr};
};

}  // namespace

std::unique_ptr<ModelSide> make_control_side() { return std::make_unique<HostModelSide>(nullptr); }

std::unique_ptr<DeviceSide> make_host_side(std::uint64_t arena_bytes, std::uint64_t slab_bytes) {
  return std::make_unique<HostSide>(arena_bytes, slab_bytes);
}

}  // namespace kvq::client

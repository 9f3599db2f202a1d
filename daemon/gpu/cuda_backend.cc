// The Backend over CUDA: slabs at their places in one address range, mirrors, jobs.
//
// Invariant: memory is held by descriptors outside and by mappings here; a spare is held without a mapping. So when
// this process dies, exactly what kvqd has no descriptor of goes back to the GPU.
#include <sys/random.h>

#include <cstring>

#include "daemon/gpu/backend.h"
#include "daemon/gpu/cuda_jobs.h"
#include "daemon/gpu/cuda_mirrors.h"

namespace kvq::gpu {
namespace {

Result<std::uint64_t> new_serial() {
  std::uint64_t serial = 0;
  while (serial == 0) {
    if (::getrandom(&serial, sizeof serial, 0) != sizeof serial) return Error{Errc::system, errno, "getrandom"};
  }
  return serial;
}

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<CudaContext> context) : context_(std::move(context)) {}
  ~CudaBackend() override {
    context_->driver().ctx_synchronize();
  }  // waits: what runs may use the mappings that go next
  Result<void> start();

  Hello hello() const override { return hello_; }
  Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) override;
  Result<NewMemory> make_slab() override;
  Result<void> place_slab(SlabId slab, std::uint64_t serial) override;
  Result<void> adopt_slab(SlabId slab, std::uint64_t serial, Descriptor file) override;
  void release_slab(SlabId slab) override { slabs_[raw(slab)] = cuda::Mapping(); }

  Result<Descriptor> make_mirror(TenantId tenant, std::uint32_t entries) override {
    return mirrors_->make(tenant, entries);
  }
  Result<void> adopt_mirror(TenantId tenant, std::uint32_t entries, Descriptor file) override {
    return mirrors_->adopt(tenant, entries, file);
  }
  Result<void> write_entries(std::span<const EntryWrite> writes) override { return mirrors_->write(writes); }
  std::uint64_t written() override { return mirrors_->written(); }

  void add_model(std::uint32_t number, const ModelGeometry& geometry) override { jobs_->add_model(number, geometry); }
  Result<void> submit(std::span<const Job> jobs) override {
    jobs_->submit(jobs);
    return {};
  }
  Result<bool> poll(std::vector<JobDone>& done) override {
    if (!mirrors_->health()) return mirrors_->health().error();
    return jobs_->poll(done);
  }

 private:
  Result<void> map_slab(SlabId slab, const cuda::Physical& memory);
  std::byte* locate(std::uint64_t offset_bytes, std::uint64_t bytes) const;

  // In this order: what is below goes first.
  std::unique_ptr<CudaContext> context_;
  std::uint64_t slab_bytes_ = 0;
  cuda::AddressRange arena_;
  std::vector<cuda::Mapping> slabs_;
  std::unordered_map<std::uint64_t, cuda::Physical> spares_;  // by serial
  std::unique_ptr<CudaMirrors> mirrors_;
  std::unique_ptr<CudaJobs> jobs_;
  Hello hello_;
};

Result<void> CudaBackend::start() {
  auto mirrors = CudaMirrors::create(*context_);
  if (!mirrors) return mirrors.error();
  mirrors_ = std::move(*mirrors);
  auto jobs = CudaJobs::create(*context_, [this](std::uint64_t at, std::uint64_t bytes) { return locate(at, bytes); });
  if (!jobs) return jobs.error();
  jobs_ = std::move(*jobs);
  const Result<std::uint64_t> free = context_->free_bytes();
  if (!free) return free.error();
  const cuda::Gpu& gpu = context_->gpu();
  hello_.driver = context_->driver().version;
  std::strncpy(hello_.device, "cuda", sizeof hello_.device - 1);
  std::strncpy(hello_.uuid, gpu.uuid.c_str(), sizeof hello_.uuid - 1);
  std::strncpy(hello_.name, gpu.name.c_str(), sizeof hello_.name - 1);
  hello_.total_bytes = gpu.total_bytes;
  hello_.free_bytes = *free;
  hello_.overhead_bytes = context_->overhead_bytes();
  hello_.granularity = context_->granularity();
  hello_.mps = context_->in_mps() ? 1 : 0;
  return {};
}

Result<void> CudaBackend::reserve(std::uint64_t slab_bytes, std::uint32_t slabs) {
  if (slab_bytes == 0 || slab_bytes % context_->granularity() != 0) {
    return Error{Errc::invalid_argument, 0, "slab_bytes is no multiple of the GPU's granularity"};
  }
  if (arena_.base() != 0) return Error{Errc::invalid_argument, 0, "the arena is reserved already"};
  Result<cuda::AddressRange> arena = cuda::AddressRange::reserve(context_->gpu().device, slab_bytes * slabs);
  if (!arena) return arena.error();
  arena_ = std::move(*arena);
  slab_bytes_ = slab_bytes;
  slabs_.resize(slabs);
  return {};
}

Result<NewMemory> CudaBackend::make_slab() {
  const Result<std::uint64_t> serial = new_serial();
  if (!serial) return serial.error();
  Result<cuda::Physical> memory = cuda::Physical::create(context_->gpu().device, slab_bytes_);
  if (!memory) return memory.error();
  const Result<int> fd = memory->export_fd();
  if (!fd) return fd.error();
  spares_.emplace(*serial, std::move(*memory));
  return NewMemory{Descriptor(*fd), *serial};
}

Result<void> CudaBackend::place_slab(SlabId slab, std::uint64_t serial) {
  const auto spare = spares_.find(serial);
  if (spare == spares_.end()) return Error{Errc::invalid_argument, 0, "no spare slab has this serial"};
  if (const Result<void> mapped = map_slab(slab, spare->second); !mapped) return mapped;
  spares_.erase(spare);
  return {};
}

Result<void> CudaBackend::adopt_slab(SlabId slab, std::uint64_t, Descriptor file) {
  const Result<cuda::Physical> memory = cuda::Physical::import(file.get());
  if (!memory) return memory.error();
  return map_slab(slab, *memory);
}

Result<void> CudaBackend::map_slab(SlabId slab, const cuda::Physical& memory) {
  if (raw(slab) >= slabs_.size()) return Error{Errc::invalid_argument, 0, "a slab beyond the arena"};
  if (slabs_[raw(slab)].base() != 0) return Error{Errc::invalid_argument, 0, "this slab is in its place already"};
  Result<cuda::Mapping> mapping = arena_.map(raw(slab) * slab_bytes_, slab_bytes_, memory, cuda::Access::read_write);
  if (!mapping) return mapping.error();
  slabs_[raw(slab)] = std::move(*mapping);
  return {};
}

std::byte* CudaBackend::locate(std::uint64_t offset_bytes, std::uint64_t bytes) const {
  if (slab_bytes_ == 0 || offset_bytes % kOffsetUnitBytes != 0) return nullptr;
  const std::uint64_t slab = offset_bytes / slab_bytes_, inside = offset_bytes % slab_bytes_;
  if (slab >= slabs_.size() || slabs_[slab].base() == 0 || bytes > slab_bytes_ - inside) return nullptr;
  return reinterpret_cast<std::byte*>(arena_.base() + offset_bytes);
}

}  // namespace

Result<std::unique_ptr<Backend>> open_cuda(const char* uuid, std::string& why_not) {
  Result<std::unique_ptr<CudaContext>> context = CudaContext::open(uuid, why_not);
  if (!context) return context.error();
  const std::string found = (*context)->gpu().uuid;
  auto backend = std::make_unique<CudaBackend>(std::move(*context));
  if (const Result<void> started = backend->start(); !started) {
    const Error& e = started.error();
    why_not = found + ": " + e.context + ": " + cuda::driver_text(e.native);
    return e;
  }
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace kvq::gpu

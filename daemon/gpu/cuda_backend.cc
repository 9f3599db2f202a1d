// The Backend over CUDA: one kind of memory for slabs and mirrors, and jobs.
//
// Invariant: what runs on the GPU has ended before memory goes.
#include <cstring>

#include "daemon/gpu/backend.h"
#include "daemon/gpu/cuda_jobs.h"
#include "daemon/gpu/cuda_mirrors.h"

namespace kvq::gpu {
namespace {

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(std::unique_ptr<CudaContext> context) : context_(std::move(context)) {}
  ~CudaBackend() override {
    context_->driver().ctx_synchronize();
  }  // waits: what runs may use the mappings that go next
  Result<void> start(std::optional<Exporter> exporter);

  Hello hello() const override { return hello_; }
  Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) override;
  Result<NewMemory> make_slab() override { return memory_->make_slab(); }
  Result<void> place_slab(SlabId slab, std::uint64_t serial) override { return memory_->place_slab(slab, serial); }
  Result<void> adopt_slab(SlabId slab, std::uint64_t, Descriptor file) override {
    return memory_->adopt_slab(slab, file);
  }
  void release_slab(SlabId slab) override { memory_->release_slab(slab); }

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
  void set_urgent(bool urgent) override { jobs_->set_urgent(urgent); }
  std::chrono::nanoseconds quiet() const override { return jobs_->quiet(); }

 private:
  std::byte* locate(std::uint64_t offset_bytes, std::uint64_t bytes) const;

  // In this order: what is below goes first.
  std::unique_ptr<CudaContext> context_;
  std::uint64_t slab_bytes_ = 0;
  std::unique_ptr<SlabMemory> memory_;
  std::unique_ptr<CudaMirrors> mirrors_;
  std::unique_ptr<CudaJobs> jobs_;
  Hello hello_;
};

Result<void> CudaBackend::start(std::optional<Exporter> exporter) {
  auto memory = choose_slab_memory(*context_, exporter);
  if (!memory) return memory.error();
  memory_ = std::move(*memory);
  auto mirrors = CudaMirrors::create(*context_, *memory_);
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
  hello_.granularity = memory_->granularity();
  hello_.exporter = memory_->exporter();
  hello_.mps = context_->in_mps() ? 1 : 0;
  return {};
}

Result<void> CudaBackend::reserve(std::uint64_t slab_bytes, std::uint32_t slabs) {
  if (slab_bytes == 0 || slab_bytes % memory_->granularity() != 0) {
    return Error{Errc::invalid_argument, 0, "slab_bytes is no multiple of the GPU's granularity"};
  }
  if (slab_bytes_ != 0) return Error{Errc::invalid_argument, 0, "the arena is reserved already"};
  if (const Result<void> reserved = memory_->reserve(slab_bytes, slabs); !reserved) return reserved;
  slab_bytes_ = slab_bytes;
  return {};
}

std::byte* CudaBackend::locate(std::uint64_t offset_bytes, std::uint64_t bytes) const {
  if (slab_bytes_ == 0 || offset_bytes % kOffsetUnitBytes != 0) return nullptr;
  const std::uint64_t inside = offset_bytes % slab_bytes_;
  const CUdeviceptr slab = memory_->slab(offset_bytes / slab_bytes_);
  return slab == 0 || bytes > slab_bytes_ - inside ? nullptr : reinterpret_cast<std::byte*>(slab + inside);
}

}  // namespace

Result<std::unique_ptr<Backend>> open_cuda(const char* uuid, std::optional<Exporter> exporter, std::string& why_not) {
  Result<std::unique_ptr<CudaContext>> context = CudaContext::open(uuid, why_not);
  if (!context) return context.error();
  const std::string found = (*context)->gpu().uuid;
  auto backend = std::make_unique<CudaBackend>(std::move(*context));
  if (const Result<void> started = backend->start(exporter); !started) {
    const Error& e = started.error();
    why_not = found + ": " + e.context + ": " + cuda::driver_text(e.native);
    return e;
  }
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace kvq::gpu

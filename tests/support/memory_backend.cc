// One thread, one queue of work with due times.
#include "tests/support/memory_backend.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "daemon/device/checksum.h"
#include "daemon/shm/memfd.h"
#include "kernels/host_kernels.h"
#include "kernels/logit_noise.h"

namespace kvq::testing {
namespace {

using Clock = std::chrono::steady_clock;
using gpu::EntryWrite;
using gpu::Job;
using gpu::JobDone;

constexpr std::uint64_t kGranularity = 4096;
constexpr int kJobsPerPoll = 16;  // so that the worker's loop goes on meanwhile

class MemoryBackend final : public gpu::Backend {
 public:
  explicit MemoryBackend(GpuFaults faults) : faults_(std::move(faults)) {}
  ~MemoryBackend() override {
    if (base_ != nullptr) ::munmap(base_, slab_bytes_ * files_.size());
    for (auto& [tenant, mirror] : mirrors_) ::munmap(mirror.words, mirror.bytes);
  }

  gpu::Hello hello() const override {
    gpu::Hello h;
    std::strncpy(h.device, "host", sizeof(h.device) - 1);
    std::strncpy(h.uuid, faults_.uuid.c_str(), sizeof(h.uuid) - 1);
    std::strncpy(h.name, "memory files", sizeof(h.name) - 1);
    h.total_bytes = faults_.total_bytes;
    h.free_bytes = faults_.total_bytes / 2;
    h.overhead_bytes = 1 << 20;
    h.granularity = kGranularity;
    h.exporter = faults_.legacy ? gpu::Exporter::legacy : gpu::Exporter::vmm;
    return h;
  }

  Result<void> reserve(std::uint64_t slab_bytes, std::uint32_t slabs) override {
    call();
    void* p = ::mmap(nullptr, slab_bytes * slabs, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return Error{Errc::system, errno, "reserving the arena"};
    base_ = static_cast<std::byte*>(p);
    slab_bytes_ = slab_bytes;
    files_.resize(slabs);
    return faults_.legacy ? make_places(slabs) : Result<void>();
  }

  Result<gpu::NewMemory> make_slab() override {
    call();
    if (faults_.legacy) return offer_place();
    if (made_slabs() >= faults_.slabs) return Error{Errc::no_memory, 2, "injected: no room for a slab"};
    Result<Descriptor> file = make_memory_file("kvq-slab", slab_bytes_);
    if (!file) return file.error();
    const std::uint64_t serial = file_number(*file);
    Descriptor exported(::fcntl(file->get(), F_DUPFD_CLOEXEC, 0));
    spares_.emplace(serial, std::move(*file));
    return gpu::NewMemory{std::move(exported), serial};
  }

  Result<void> place_slab(SlabId slab, std::uint64_t serial) override {
    call();
    if (faults_.legacy) return fill_place(slab, serial);
    const auto spare = spares_.find(serial);
    if (spare == spares_.end()) return Error{Errc::stale_id, 0, "no spare of that serial"};
    const Result<void> done = map(slab, std::move(spare->second));
    spares_.erase(spare);
    return done;
  }

  Result<void> adopt_slab(SlabId slab, std::uint64_t, Descriptor file) override {
    call();
    if (faults_.legacy) return kEnded;
    if (raw(slab) == faults_.refuse_slab) return Error{Errc::system, 1, "injected: this slab cannot be imported"};
    if (raw(slab) == faults_.no_room_for_slab) return Error{Errc::no_memory, 2, "injected: no room to map this slab"};
    return map(slab, std::move(file));
  }

  void release_slab(SlabId slab) override {
    call();
    if (faults_.legacy) {
      places_.at(raw(slab)) = {};
      return;
    }
    ::mmap(place(slab), slab_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    files_.at(raw(slab)).reset();
  }

  Result<Descriptor> make_mirror(TenantId tenant, std::uint32_t entries) override {
    call();
    if (mirrors_.size() >= faults_.mirrors) return Error{Errc::no_memory, 2, "injected: no room for a mirror"};
    Result<Descriptor> file = make_memory_file("kvq-mirror", bytes_of(entries));
    if (!file) return file.error();
    Descriptor exported(::fcntl(file->get(), F_DUPFD_CLOEXEC, 0));
    if (const Result<void> done = map_mirror(tenant, entries, std::move(*file)); !done) return done.error();
    return exported;
  }

  Result<void> adopt_mirror(TenantId tenant, std::uint32_t entries, Descriptor file) override {
    call();
    if (faults_.legacy) return kEnded;
    if (raw(tenant) == faults_.refuse_mirror) return Error{Errc::system, 1, "injected: this mirror cannot be imported"};
    return map_mirror(tenant, entries, std::move(file));
  }

  Result<void> write_entries(std::span<const EntryWrite> writes) override {
    entries_ += writes.size();
    strike(entries_, faults_.die_at_entry, faults_.hang_at_entry);
    batches_.push_back({{writes.begin(), writes.end()}, due(faults_.slow_writes_us)});
    return {};
  }

  std::uint64_t written() override {
    while (!batches_.empty() && batches_.front().due <= Clock::now()) {
      for (const EntryWrite& w : batches_.front().writes) {
        const Mirror& mirror = mirrors_.at(TenantId{w.tenant});
        if (w.page >= mirror.entries) std::abort();
        std::atomic_ref(mirror.words[w.page]).store(w.entry, std::memory_order_release);
        written_ = w.sequence;
      }
      batches_.pop_front();
    }
    return written_;
  }

  void add_model(std::uint32_t number, const ModelGeometry& geometry) override {
    call();
    models_[number] = geometry;
  }

  Result<void> submit(std::span<const Job> jobs) override {
    for (const Job& job : jobs) {
      strike(++jobs_, faults_.die_at_job, faults_.hang_at_job);
      queue_.push_back({job, jobs_, due(faults_.slow_us * (queue_.size() + 1))});
    }
    return {};
  }

  void set_urgent(bool urgent) override { urgent_ = urgent; }

  Result<bool> poll(std::vector<JobDone>& done) override {
    if (faults_.paced && !urgent_) return !queue_.empty();
    for (int n = 0; n < kJobsPerPoll && !queue_.empty() && queue_.front().due <= Clock::now(); ++n) {
      const Queued q = queue_.front();
      if (is_armed() && q.number == faults_.lose_at_job) {
        spend();
        return Error{Errc::context_lost, 700, "injected: the context is lost"};
      }
      queue_.pop_front();
      if (faults_.fail_every != 0 && q.number % faults_.fail_every == 0) {
        done.push_back({.id = q.job.id, .code = Errc::system, .native = 999});
      } else {
        done.push_back(run(q.job));
      }
    }
    return !queue_.empty();
  }

 private:
  struct Mirror {
    std::uint64_t* words;
    std::uint64_t bytes;
    std::uint32_t entries;
  };
  struct Place {  // legacy: neither: free
    std::uint64_t spare = 0;
    bool taken = false;
  };
  static constexpr Error kEnded{Errc::stale_id, 0, "memory of a legacy handle ends with the worker that made it"};
  struct Batch {
    std::vector<EntryWrite> writes;
    Clock::time_point due;
  };
  struct Queued {
    Job job;
    std::uint64_t number;
    Clock::time_point due;
  };

  static Clock::time_point due(std::uint64_t us) { return Clock::now() + std::chrono::microseconds(us); }
  static std::uint64_t bytes_of(std::uint32_t entries) {
    return (entries * std::uint64_t{8} + kGranularity - 1) / kGranularity * kGranularity;
  }
  std::byte* place(SlabId slab) const { return base_ + std::uint64_t{raw(slab)} * slab_bytes_; }
  std::uint64_t made_slabs() const {
    std::uint64_t n = spares_.size();
    for (const auto& file : files_) n += file ? 1 : 0;
    return n;
  }

  // One fewer than fit, as the real one.
  Result<void> make_places(std::uint32_t slabs) {
    places_.resize(faults_.slabs < slabs ? std::max<std::uint64_t>(faults_.slabs, 1) - 1 : slabs);
    for (std::uint32_t i = 0; i < places_.size(); ++i) {
      Result<Descriptor> file = make_memory_file("kvq-slab", slab_bytes_);
      if (!file) return file.error();
      if (const Result<void> mapped = map(SlabId{i}, std::move(*file)); !mapped) return mapped;
    }
    return {};
  }
  Result<gpu::NewMemory> offer_place() {
    for (std::uint32_t i = 0; i < places_.size(); ++i) {
      if (places_[i].taken || places_[i].spare != 0) continue;
      std::memset(place(SlabId{i}), 0, slab_bytes_);
      places_[i].spare = ++serials_ << 32 | ::getpid();
      return gpu::NewMemory{Descriptor(::fcntl(files_[i]->get(), F_DUPFD_CLOEXEC, 0)), places_[i].spare, i};
    }
    return Error{Errc::no_memory, 2, "injected: no place is left"};
  }
  Result<void> fill_place(SlabId slab, std::uint64_t serial) {
    Place& p = places_.at(raw(slab));
    if (p.taken || serial == 0 || p.spare != serial) return Error{Errc::stale_id, 0, "no spare of that place"};
    p = {.spare = 0, .taken = true};
    return {};
  }

  Result<void> map(SlabId slab, Descriptor file) {
    if (::mmap(place(slab), slab_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
      return Error{Errc::system, errno, "mapping a slab"};
    }
    files_.at(raw(slab)) = std::move(file);
    return {};
  }

  Result<void> map_mirror(TenantId tenant, std::uint32_t entries, Descriptor file) {
    if (const Result<void> good = check_memory_file(file, bytes_of(entries)); !good) return good.error();
    void* p = ::mmap(nullptr, bytes_of(entries), PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (p == MAP_FAILED) return Error{Errc::system, errno, "mapping a mirror"};
    mirrors_[tenant] = {static_cast<std::uint64_t*>(p), bytes_of(entries), entries};
    return {};
  }

  JobDone run(const Job& job) {
    const ModelGeometry& geometry = models_.at(job.model);
    const PageLayout from = make_layout(geometry, job.from);
    const std::byte* source = base_ + job.source_bytes;
    JobDone done{.id = job.id};
    if (job.has_checksum != 0 || job.to == Format::none) {
      done.checksum = page_checksum(source, from.page_bytes);
      if (job.has_checksum != 0 && done.checksum != job.checksum) return {.id = job.id, .code = Errc::lost_page};
    }
    if (job.to == Format::none) return done;
    const PageLayout to = make_layout(geometry, job.to);
    std::byte* destination = base_ + job.destination_bytes;
    done.code = transcode_page(geometry, from, source, to, destination).error().code;
    if (done.code != Errc::ok) return done;
    done.checksum = page_checksum(destination, to.page_bytes);
    if (job.measured != gpu::kNoLayer) {
      const LayerPlace &dense = from.layer[job.measured], &cold = to.layer[job.measured];
      done.noise = logit_noise(geometry.layer[job.measured], dense, source + dense.offset_bytes, cold,
                               destination + cold.offset_bytes);
    }
    return done;
  }

  bool is_armed() const { return faults_.once.empty() || ::access(faults_.once.c_str(), F_OK) != 0; }
  void spend() const {
    if (!faults_.once.empty()) ::close(::open(faults_.once.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  }
  // Counts may jump over the number: at or past it counts, once for each worker.
  void strike(std::uint64_t count, std::uint64_t die, std::uint64_t hang) {
    if (struck_ || !is_armed()) return;
    if (die != 0 && count >= die) {
      spend();
      ::raise(SIGKILL);
    }
    if (hang != 0 && count >= hang) {
      spend();
      struck_ = true;
      for (;;) ::pause();
    }
  }
  void call() { strike(++calls_, faults_.die_at_call, faults_.hang_at_call); }

  const GpuFaults faults_;
  std::uint64_t slab_bytes_ = 0;
  std::byte* base_ = nullptr;
  std::vector<std::optional<Descriptor>> files_;
  std::map<std::uint64_t, Descriptor> spares_;
  std::vector<Place> places_;
  std::map<TenantId, Mirror> mirrors_;
  std::map<std::uint32_t, ModelGeometry> models_;
  std::deque<Batch> batches_;
  std::deque<Queued> queue_;
  std::uint64_t written_ = 0, serials_ = 0, jobs_ = 0, entries_ = 0, calls_ = 0;
  bool struck_ = false, urgent_ = false;
};

}  // namespace

GpuFaults parse_faults(const std::string& text) {
  GpuFaults f;
  const std::map<std::string, std::uint64_t*> numbers = {
      {"slow_us", &f.slow_us},           {"slow_writes_us", &f.slow_writes_us},
      {"fail_every", &f.fail_every},     {"slabs", &f.slabs},
      {"mirrors", &f.mirrors},           {"die_at_job", &f.die_at_job},
      {"die_at_entry", &f.die_at_entry}, {"die_at_call", &f.die_at_call},
      {"hang_at_job", &f.hang_at_job},   {"hang_at_entry", &f.hang_at_entry},
      {"hang_at_call", &f.hang_at_call}, {"lose_at_job", &f.lose_at_job},
      {"refuse_slab", &f.refuse_slab},   {"refuse_mirror", &f.refuse_mirror},
      {"total_bytes", &f.total_bytes},   {"no_room_for_slab", &f.no_room_for_slab}};
  const std::map<std::string, bool*> switches = {{"legacy", &f.legacy}, {"no_vmm", &f.no_vmm}, {"paced", &f.paced}};
  const std::map<std::string, std::string*> texts = {{"uuid", &f.uuid}, {"no_gpu", &f.no_gpu}, {"once", &f.once}};
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const std::string key = part.substr(0, part.find('=')), value = part.substr(part.find('=') + 1);
    if (const auto number = numbers.find(key); number != numbers.end()) {
      *number->second = std::stoull(value);
    } else if (const auto on = switches.find(key); on != switches.end()) {
      *on->second = value == "1";
    } else if (const auto word = texts.find(key); word != texts.end()) {
      *word->second = value;
    } else {
      throw std::invalid_argument("no such fault: " + part);
    }
  }
  return f;
}

std::unique_ptr<gpu::Backend> make_memory_backend(const GpuFaults& faults) {
  return std::make_unique<MemoryBackend>(faults);
}

}  // namespace kvq::testing

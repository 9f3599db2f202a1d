// The host device: slabs are memory files, mapped at their places in one reserved address range; jobs run the SIMD
// kernels.
//
// Invariant: an address in the arena is either inside a live slab or inaccessible. Workers touch only the arena and the
// batch they were given; both outlive them, because every batch holds the shared state.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <stdexcept>
#include <utility>

#include "daemon/device/checksum.h"
#include "daemon/device/device.h"
#include "daemon/shm/memfd.h"
#include "kernels/host_kernels.h"
#include "kernels/logit_noise.h"

namespace kvq {
namespace {

constexpr std::size_t kJobsPerBatch =
    8;  // one worker's piece: small enough to spread, large enough to be worth a wake-up

// The reserved range. Unmapped when the device and the last batch are gone.
struct Arena {
  explicit Arena(std::uint64_t bytes) : size(bytes) {
    void* p = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error("cannot reserve the arena's address range");
    base = static_cast<std::byte*>(p);
  }
  ~Arena() { ::munmap(base, size); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* base = nullptr;
  std::size_t size;
};

// Loop thread only, apart from the arena.
struct Shared {
  explicit Shared(std::uint64_t bytes) : arena(bytes) {}
  Arena arena;
  std::vector<TranscodeDone> finished;
  std::size_t in_flight = 0;
};

// Workers write `done`; the loop thread reads it afterwards.
struct Batch {
  std::vector<TranscodeJob> jobs;
  std::vector<TranscodeDone> done;
};

TranscodeDone run_job(const TranscodeJob& job, std::byte* base) {
  const std::byte* source = base + job.source_bytes;
  TranscodeDone done{.id = job.id};
  if (job.checksum || job.to == nullptr) {
    done.checksum = page_checksum(source, job.from->page_bytes);
    if (job.checksum && *job.checksum != done.checksum) {
      done.error = {Errc::lost_page, 0, "its bytes do not fit its checksum"};
      return done;
    }
  }
  if (job.to == nullptr) return done;
  std::byte* destination = base + job.destination_bytes;
  done.error = transcode_page(*job.geometry, *job.from, source, *job.to, destination).error();
  if (done.error.code != Errc::ok) return done;
  done.checksum = page_checksum(destination, job.to->page_bytes);
  if (job.measured) {
    const LayerPlace &dense = job.from->layer[*job.measured], &cold = job.to->layer[*job.measured];
    done.noise = logit_noise(job.geometry->layer[*job.measured], dense, source + dense.offset_bytes, cold,
                             destination + cold.offset_bytes);
  }
  return done;
}

void run_batch(Batch& batch, std::byte* base) {
  for (const TranscodeJob& job : batch.jobs) batch.done.push_back(run_job(job, base));
}

class HostDevice final : public Device {
 public:
  HostDevice(std::uint64_t arena_bytes, std::uint64_t most_bytes, std::uint64_t slab_bytes, RunBlocking run)
      : slab_bytes_(slab_bytes),
        asked_bytes_(arena_bytes),
        arena_bytes_(arena_bytes),
        run_(std::move(run)),
        shared_(std::make_shared<Shared>(most_bytes)),
        files_(most_bytes / slab_bytes) {}

  std::string name() const override { return "host"; }
  std::uint64_t arena_bytes() const override { return arena_bytes_; }
  std::uint64_t slab_bytes() const override { return slab_bytes_; }
  std::uint64_t asked_bytes() const override { return asked_bytes_; }
  std::uint64_t most_bytes() const override { return shared_->arena.size; }
  bool can_resize() const override { return true; }
  void resize(std::uint64_t bytes) override { arena_bytes_ = bytes; }

  Result<void> create_slab(SlabId slab) override {
    Result<Descriptor> file = make_memory_file("kvq-slab", slab_bytes_);
    if (!file) return file.error();
    const std::uint64_t serial = file_number(*file);
    return place_slab(slab, std::move(*file), serial);
  }

  Result<void> adopt_slab(SlabId slab, Descriptor& file, std::uint64_t serial) override {
    if (const Result<void> good = check_memory_file(file, slab_bytes_); !good) return good.error();
    return place_slab(slab, std::move(file), serial);
  }

  std::uint64_t slab_serial(SlabId slab) const override {
    KVQ_ASSERT(raw(slab) < files_.size() && files_[raw(slab)]);
    return files_[raw(slab)]->serial;
  }

  void destroy_slab(SlabId slab) override {
    KVQ_ASSERT(raw(slab) < files_.size() && files_[raw(slab)]);
    void* p =
        ::mmap(place(slab), slab_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    KVQ_ASSERT(p != MAP_FAILED);
    files_[raw(slab)].reset();
  }

  int descriptor(SlabId slab, bool writable) const override {
    KVQ_ASSERT(raw(slab) < files_.size() && files_[raw(slab)]);
    const Files& files = *files_[raw(slab)];
    return writable ? files.file.get() : files.reader.get();
  }

  void submit(std::span<const TranscodeJob> jobs) override {
    for (std::size_t at = 0; at < jobs.size(); at += kJobsPerBatch) {
      const std::span<const TranscodeJob> part = jobs.subspan(at, std::min(kJobsPerBatch, jobs.size() - at));
      auto batch = std::make_shared<Batch>();
      batch->jobs.assign(part.begin(), part.end());
      batch->done.reserve(part.size());
      shared_->in_flight += part.size();
      run_([batch, shared = shared_] { run_batch(*batch, shared->arena.base); },
           [batch, shared = shared_] {
             shared->finished.insert(shared->finished.end(), batch->done.begin(), batch->done.end());
           });
    }
  }

  void poll(std::vector<TranscodeDone>& done) override {
    shared_->in_flight -= shared_->finished.size();
    done.insert(done.end(), shared_->finished.begin(), shared_->finished.end());
    shared_->finished.clear();
  }

  std::size_t in_flight() const override { return shared_->in_flight; }

 private:
  struct Files {
    Descriptor file, reader;
    std::uint64_t serial;
  };
  Result<void> place_slab(SlabId slab, Descriptor file, std::uint64_t serial) {
    KVQ_ASSERT(raw(slab) < files_.size() && !files_[raw(slab)]);
    Result<Descriptor> reader = reopen_read_only(file);
    if (!reader) return reader.error();
    if (::mmap(place(slab), slab_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
      return Error{Errc::system, errno, "mapping a slab"};
    }
    files_[raw(slab)] = Files{std::move(file), std::move(*reader), serial};
    return {};
  }
  std::byte* place(SlabId slab) const { return shared_->arena.base + std::uint64_t{raw(slab)} * slab_bytes_; }

  const std::uint64_t slab_bytes_, asked_bytes_;
  std::uint64_t arena_bytes_;
  RunBlocking run_;
  std::shared_ptr<Shared> shared_;
  std::vector<std::optional<Files>> files_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(std::uint64_t arena_bytes, std::uint64_t slab_bytes, RunBlocking run,
                                         std::uint64_t most_bytes) {
  if (most_bytes == 0) most_bytes = arena_bytes;
  if (slab_bytes == 0 || slab_bytes % 4096 != 0 || arena_bytes == 0 || arena_bytes % slab_bytes != 0 ||
      most_bytes % slab_bytes != 0) {
    throw std::invalid_argument("slab_bytes must be a multiple of 4096 and arena_bytes a multiple of slab_bytes");
  }
  if (most_bytes / kOffsetUnitBytes > kOffsetMask) {
    throw std::invalid_argument("arena_bytes is larger than a directory entry can address");
  }
  return std::make_unique<HostDevice>(arena_bytes, most_bytes, slab_bytes, std::move(run));
}

}  // namespace kvq

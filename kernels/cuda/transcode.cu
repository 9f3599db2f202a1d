// The transcoder's host side: checks, staging, launches, results.
//
// Invariant: a ticket's staging is written by launch() only, after collect() has returned its last results, so the copy
// to the device and the kernel never see it change. Everything is allocated in create(). A batch of few pages is one
// launch and nothing else.
#include <cuda_runtime.h>

#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_transcode.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/transcode_describe.h"
#include "kernels/cuda/transcode_kernels.h"
#include "kernels/cuda/transcode_shape.h"

namespace kvq::cuda {
namespace {

// Shared memory behind the buffers: a block decoded to dense, or what the choice of kept channels needs.
std::uint32_t scratch_bytes(Format to, const LayerWork* layers, std::uint32_t count) {
  if (kept_channels(to) != 0) return kKeyScratchBytes;
  std::uint32_t bytes = 0;
  for (const LayerWork* layer = layers; to == Format::dense && layer != layers + count; ++layer) {
    bytes = std::max(bytes, layer->to_bytes);
  }
  return bytes;
}

class DeviceTranscoder final : public Transcoder {
 public:
  explicit DeviceTranscoder(Stream stream) : stream_(stream) {}
  ~DeviceTranscoder() override {
    if (in_flight()) cudaStreamSynchronize(stream_);
    cudaFree(device_);
    cudaFreeHost(pinned_);
  }

  Error allocate(std::uint32_t max_jobs, std::uint32_t batches);
  Result<std::uint32_t> launch(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to,
                               std::span<const PageJob> jobs) override;
  Result<bool> is_done(std::uint32_t ticket) override;
  void collect(std::uint32_t ticket, std::span<PageJobDone> results) override;

 private:
  struct PageSums {
    std::uint64_t expected, source, destination;
    bool has_expected, refused, sum_only;
  };
  struct Ticket {
    std::vector<PageSums> pages;
    std::uint32_t runs = 0, runs_per_page = 1, seen = 0;  // the sums of `seen` runs have come
    std::uint64_t tag = 0;                                // no two batches of a ticket have the same
    bool in_flight = false;
  };

  // A ticket's part of the device's memory: the count of claimed runs, then what is copied there where it does not fit
  // into the launch, layers and jobs. Of pinned memory: the same copied part, then the sums of runs.
  static constexpr std::uint64_t kUploadAt = 256, kJobsAt = round_up(kMaxLayers * sizeof(LayerWork), 256);
  std::uint64_t sums_at() const { return round_up(kUploadAt + kJobsAt + max_jobs_ * sizeof(JobWork), 256); }
  std::byte* pinned(std::uint32_t ticket) const { return pinned_ + ticket * ticket_bytes_; }
  std::byte* on_device(std::uint32_t ticket) const { return device_ + ticket * sums_at(); }
  RunSums* sums(std::uint32_t ticket) const { return reinterpret_cast<RunSums*>(pinned(ticket) + sums_at()); }
  bool in_flight() const {
    return std::any_of(tickets_.begin(), tickets_.end(), [](const Ticket& t) { return t.in_flight; });
  }
  bool has_reported(std::uint32_t ticket);
  Error describe_jobs(const PageLayout* to, std::span<const PageJob> jobs, JobWork* work, Ticket& ticket) const;
  cudaError_t start(std::uint32_t number, const LayerWork* layers, BatchWork& batch);
  void split_into_runs(std::uint32_t number, std::uint32_t ctas, BatchWork& batch);
  std::uint32_t choose_stages(std::uint32_t scratch, BatchWork& batch) const;

  Stream stream_;
  std::uint32_t max_jobs_ = 0, max_runs_ = 0, processors_ = 0, shared_bytes_ = 0, shared_bytes_all_ = 0;
  bool may_overlap_ = false;
  std::uint64_t ticket_bytes_ = 0;
  std::byte* pinned_ = nullptr;  // mapped, at the same address on the device
  std::byte* device_ = nullptr;
  std::vector<Ticket> tickets_;
};

Error DeviceTranscoder::allocate(std::uint32_t max_jobs, std::uint32_t batches) {
  max_jobs_ = max_jobs;
  max_runs_ = 4096 + 64 * max_jobs;
  ticket_bytes_ = sums_at() + max_runs_ * sizeof(RunSums);
  int device = 0, processors = 0, shared = 0, shared_all = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  ask(processors, cudaDevAttrMultiProcessorCount);
  ask(shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(shared_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(major, cudaDevAttrComputeCapabilityMajor);
  if (error != cudaSuccess) return driver_error(error, "no CUDA device for the transcoder");
  processors_ = static_cast<std::uint32_t>(processors);
  shared_bytes_ = static_cast<std::uint32_t>(shared) - kDeclaredBytes;
  shared_bytes_all_ = static_cast<std::uint32_t>(shared_all);
  may_overlap_ = major >= 9;
  error = cudaHostAlloc(reinterpret_cast<void**>(&pinned_), ticket_bytes_ * batches,
                        cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&device_), sums_at() * batches);
  if (error == cudaSuccess) error = cudaMemsetAsync(device_, 0, sums_at() * batches, stream_);
  if (error != cudaSuccess) return driver_error(error, "staging memory of the transcoder");
  std::memset(pinned_, 0, ticket_bytes_ * batches);
  tickets_.resize(batches);
  for (Ticket& ticket : tickets_) ticket.pages.reserve(max_jobs);
  return {};
}

Error DeviceTranscoder::describe_jobs(const PageLayout* to, std::span<const PageJob> jobs, JobWork* work,
                                      Ticket& ticket) const {
  ticket.pages.clear();
  for (const PageJob& job : jobs) {
    const std::byte* destination = to == nullptr ? nullptr : job.destination;
    if (job.source == nullptr || (to != nullptr && destination == nullptr) ||
        (reinterpret_cast<std::uintptr_t>(job.source) | reinterpret_cast<std::uintptr_t>(destination)) % kChunkBytes !=
            0) {
      return {Errc::invalid_argument, 0, "a page to transcode is null or not aligned to 16 bytes"};
    }
    *work++ = {job.source, job.destination};
    ticket.pages.push_back({job.checksum, 0, 0, job.has_checksum, false, to == nullptr});
  }
  return {};
}

Result<std::uint32_t> DeviceTranscoder::launch(const ModelGeometry& geometry, const PageLayout& from,
                                               const PageLayout* to, std::span<const PageJob> jobs) {
  if (Error error = check_pair(geometry, from, to); error.code != Errc::ok) return error;
  if (jobs.size() > max_jobs_)
    return Error{Errc::invalid_argument, 0, "more pages than a batch of the transcoder holds"};
  const auto free = std::find_if(tickets_.begin(), tickets_.end(), [](const Ticket& t) { return !t.in_flight; });
  if (free == tickets_.end()) return Error{Errc::limit_reached, 0, "all batches of the transcoder are in flight"};
  const auto ticket = static_cast<std::uint32_t>(free - tickets_.begin());

  BatchWork batch{};
  auto* layers = reinterpret_cast<LayerWork*>(pinned(ticket) + kUploadAt);
  const bool few = describe(geometry, from, to, layers, batch) <= kFewLayers && jobs.size() <= kFewJobs;
  if (batch.blocks_per_page == 0) return Error{Errc::wrong_layout, 0, "model has no KV heads"};
  JobWork* work = few ? batch.few_jobs : reinterpret_cast<JobWork*>(pinned(ticket) + kUploadAt + kJobsAt);
  if (Error error = describe_jobs(to, jobs, work, *free); error.code != Errc::ok) return error;
  if (few) {
    std::copy_n(layers, batch.layer_count, batch.few_layers);
  } else {
    batch.layers = reinterpret_cast<const LayerWork*>(on_device(ticket) + kUploadAt);
    batch.jobs = reinterpret_cast<const JobWork*>(on_device(ticket) + kUploadAt + kJobsAt);
  }
  const cudaError_t error = start(ticket, layers, batch);
  if (error == cudaErrorInvalidConfiguration) {
    return Error{Errc::wrong_layout, 0, "blocks of these layers need more shared memory than this GPU has"};
  }
  if (error != cudaSuccess) return driver_error(error, "launch of a transcode");
  free->in_flight = true;
  return ticket;
}

cudaError_t DeviceTranscoder::start(std::uint32_t number, const LayerWork* layers, BatchWork& batch) {
  const Rewritten all = rewritten(layers, batch.layer_count);
  const TranscodeKernel kernel = find_kernel(all);
  const std::uint32_t shared = choose_stages(scratch_bytes(all.to, layers, batch.layer_count), batch);
  if (batch.stages == 0) return cudaErrorInvalidConfiguration;
  int per_processor = 0;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_));
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kTranscodeThreads + 32, shared);
  }
  if (error != cudaSuccess) return error;
  const std::uint32_t resident = processors_ * static_cast<std::uint32_t>(std::max(per_processor, 1));
  split_into_runs(number, resident, batch);
  if (batch.runs == 0) return cudaSuccess;
  if (batch.layers != nullptr) {
    const std::uint64_t bytes = kJobsAt + tickets_[number].pages.size() * sizeof(JobWork);
    error = cudaMemcpyAsync(on_device(number) + kUploadAt, pinned(number) + kUploadAt, bytes, cudaMemcpyHostToDevice,
                            stream_);
    if (error != cudaSuccess) return error;
  }
  // Alone, a small batch has a CTA for each block; among others, CTAs with two blocks on their way leave room to more.
  const bool overlaps = may_overlap_ && in_flight();  // what is before a first batch need not be one of ours
  const std::uint32_t per_cta = overlaps ? std::min(batch.stages, 2u) : 1;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = std::min(resident, divide_up(batch.runs, per_cta));
  config.blockDim = kTranscodeThreads + 32;
  config.dynamicSmemBytes = shared;
  config.stream = stream_;
  config.attrs = &overlap;
  config.numAttrs = overlaps;
  return cudaLaunchKernelEx(&config, kernel, batch);
}

// Runs are short, so that what is read at the same time lies close together, but a large batch need not report every
// block.
void DeviceTranscoder::split_into_runs(std::uint32_t number, std::uint32_t ctas, BatchWork& batch) {
  Ticket& ticket = tickets_[number];
  const std::uint64_t jobs = ticket.pages.size(), blocks = jobs * batch.blocks_per_page;
  const std::uint64_t most_per_page = std::max<std::uint64_t>(max_runs_ / std::max<std::uint64_t>(jobs, 1), 1);
  batch.run_blocks = std::max(static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks / ctas / 16, 1, 4)),
                              divide_up(batch.blocks_per_page, most_per_page));
  batch.runs_per_page = ticket.runs_per_page = divide_up(batch.blocks_per_page, batch.run_blocks);
  batch.runs = ticket.runs = static_cast<std::uint32_t>(jobs * batch.runs_per_page);
  ticket.seen = 0;
  batch.tag = ticket.tag += 2;
  batch.sums = sums(number);
  batch.claimed_runs = reinterpret_cast<std::uint32_t*>(on_device(number));
}

// Sets the number of buffers, 0 if there is no room for one; returns the bytes with the scratch behind them.
std::uint32_t DeviceTranscoder::choose_stages(std::uint32_t scratch, BatchWork& batch) const {
  const auto buffers = [&](std::uint32_t ctas) {
    const std::uint32_t share = std::min(shared_bytes_, shared_bytes_all_ / ctas - 1024 - kDeclaredBytes);
    return share > scratch ? std::min((share - scratch) / batch.stage_bytes, kMaxStages) : 0;
  };
  // Two or more for each of as many CTAs as there may be, or of one less; else one, where the others' work hides it.
  batch.stages = 0;
  for (std::uint32_t ctas = kTranscodeCtas; ctas >= 2 && batch.stages < 2; --ctas) batch.stages = buffers(ctas);
  if (batch.stages < 2) batch.stages = 0;
  for (std::uint32_t ctas = kTranscodeCtas; ctas >= 1 && batch.stages == 0; --ctas) batch.stages = buffers(ctas);
  return batch.stages * batch.stage_bytes + scratch;
}

// Adds up what has come.
bool DeviceTranscoder::has_reported(std::uint32_t number) {
  Ticket& ticket = tickets_[number];
  const RunSums* run = sums(number) + ticket.seen;
  for (; ticket.seen < ticket.runs; ++ticket.seen, ++run) {
    const std::uint64_t tag = __atomic_load_n(&run->source.tag, __ATOMIC_ACQUIRE);
    if ((tag & ~std::uint64_t{1}) != ticket.tag ||
        __atomic_load_n(&run->destination.tag, __ATOMIC_ACQUIRE) != ticket.tag) {
      return false;
    }
    PageSums& page = ticket.pages[ticket.seen / ticket.runs_per_page];
    page.source += run->source.sum;
    page.destination += run->destination.sum;
    page.refused |= (tag & 1) != 0;
  }
  return true;
}

// A batch is seen to be done as soon as its last run has reported, a little before the stream is.
Result<bool> DeviceTranscoder::is_done(std::uint32_t ticket) {
  KVQ_ASSERT(ticket < tickets_.size() && tickets_[ticket].in_flight);
  if (has_reported(ticket)) return true;
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaSuccess || state == cudaErrorNotReady) return has_reported(ticket);
  return driver_error(state, "transcode in flight");
}

void DeviceTranscoder::collect(std::uint32_t ticket, std::span<PageJobDone> done) {
  KVQ_ASSERT(ticket < tickets_.size() && tickets_[ticket].in_flight && done.size() == tickets_[ticket].pages.size());
  const bool all = has_reported(ticket);
  KVQ_ASSERT(all);
  for (std::size_t i = 0; i < done.size(); ++i) {
    const PageSums& page = tickets_[ticket].pages[i];
    Errc code = page.refused ? Errc::invalid_argument : Errc::ok;
    if (page.has_expected && page.expected != page.source) code = Errc::lost_page;
    done[i] = {code, page.sum_only ? page.source : page.destination};
  }
  tickets_[ticket].in_flight = false;
}

}  // namespace

Result<std::unique_ptr<Transcoder>> Transcoder::create(std::uint32_t max_jobs, std::uint32_t batches, Stream stream) {
  auto made = std::make_unique<DeviceTranscoder>(stream);
  if (Error error = made->allocate(max_jobs, batches); error.code != Errc::ok) return error;
  return std::unique_ptr<Transcoder>(std::move(made));
}

}  // namespace kvq::cuda

// The transcoder's host side: checks, staging, launches, results.
//
// Invariant: a ticket's staging is written by launch() only, after collect() has returned its last results, so the copy
// to the device and the kernel never see it change. Everything is allocated in create(). A batch of few pages is one
// launch and nothing else.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/cuda_transcode.h"
#include "kernels/cuda/driver.h"
#include "kernels/cuda/transcode_kernel.cuh"
#include "kernels/cuda/transcode_rewrites.cuh"

namespace kvq::cuda {
namespace {

using Kernel = void (*)(BatchWork);
constexpr std::uint32_t kChunkBytes = 16;
constexpr std::uint32_t kDeclaredBytes = 2048;  // of shared memory, by kernels themselves at most
static_assert(sizeof(Stage) * kMaxStages <= kDeclaredBytes);

constexpr Kernel kKernels[] = {rewrite_pages<RewriteNothing>,
                               rewrite_pages<RewriteToDense>,
                               rewrite_pages<RewriteMixed<Target::int4>>,
                               rewrite_pages<RewriteMixed<Target::kept>>,
                               rewrite_pages<RewriteMixed<Target::wide>>,
                               rewrite_pages<RewriteAlike<Target::int4, 64, Dtype::fp16>>,
                               rewrite_pages<RewriteAlike<Target::int4, 64, Dtype::bf16>>,
                               rewrite_pages<RewriteAlike<Target::int4, 128, Dtype::fp16>>,
                               rewrite_pages<RewriteAlike<Target::int4, 128, Dtype::bf16>>,
                               rewrite_pages<RewriteAlike<Target::kept, 128, Dtype::fp16>>,
                               rewrite_pages<RewriteAlike<Target::kept, 128, Dtype::bf16>>,
                               rewrite_pages<RewriteAlike<Target::wide, 128, Dtype::fp16>>,
                               rewrite_pages<RewriteAlike<Target::wide, 128, Dtype::bf16>>};

bool quantized(Format f) {
  return f == Format::int4 || f == Format::int4_k4 || f == Format::int4_k8 || f == Format::k8v4;
}

// Whether `next` only continues `layer`.
bool alike(const LayerWork& layer, const LayerWork& next) {
  return layer.from_bytes == next.from_bytes && layer.to_bytes == next.to_bytes && layer.head_dim == next.head_dim &&
         layer.from == next.from && layer.to == next.to && layer.dtype == next.dtype;
}

Error check_pair(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to) {
  if (geometry.layers == 0 || geometry.layers > kMaxLayers) return {Errc::wrong_layout, 0, "layer count is not 1..256"};
  for (const PageLayout* layout : {&from, to}) {
    if (layout != nullptr && layout->format != Format::dense && !quantized(layout->format)) {
      return {Errc::wrong_layout, 0, "page format is unknown"};
    }
  }
  if (to != nullptr && from.format != to->format && quantized(from.format) && quantized(to->format)) {
    return {Errc::invalid_argument, 0, "no transcode between two quantized formats"};
  }
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    if (!head_dim_supported(geometry.layer[i].head_dim)) {
      return {Errc::wrong_layout, 0, "head_dim is not 64, 80, 96, 128, 192 or 256"};
    }
  }
  if (from.page_bytes >= std::uint64_t{1} << 33) return {Errc::wrong_layout, 0, "page is 8 GiB or larger"};
  return {};
}

// The table of layers that have blocks, and what is common to them. Returns how many entries that are.
std::uint32_t describe(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to, LayerWork* layers,
                       BatchWork& batch) {
  std::uint32_t count = 0;
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    const LayerSpec& spec = geometry.layer[i];
    if (spec.kv_heads == 0) continue;
    const LayerPlace &a = from.layer[i], b = to == nullptr ? LayerPlace{0, 0, a.format} : to->layer[i];
    LayerWork work{};
    work.first_block = batch.blocks_per_page;
    work.from_chunk = static_cast<std::uint32_t>(a.offset_bytes / kChunkBytes);
    work.to_chunk = static_cast<std::uint32_t>(b.offset_bytes / kChunkBytes);
    work.from_bytes = static_cast<std::uint32_t>(a.head_bytes);
    work.to_bytes = static_cast<std::uint32_t>(b.head_bytes);
    work.head_dim = spec.head_dim;
    work.from = a.format;
    work.to = b.format;
    work.dtype = spec.dtype;
    if (count == 0 || !alike(layers[count - 1], work)) layers[count++] = work;
    batch.blocks_per_page += spec.kv_heads;
    batch.from_end_chunk = work.from_chunk + spec.kv_heads * (work.from_bytes / kChunkBytes);
    batch.to_end_chunk = work.to_chunk + spec.kv_heads * (work.to_bytes / kChunkBytes);
    batch.stage_bytes = std::max(batch.stage_bytes, work.from_bytes);
  }
  batch.layer_count = count;
  batch.from_chunks = static_cast<std::uint32_t>(from.page_bytes / kChunkBytes);
  batch.to_chunks = to == nullptr ? 0 : static_cast<std::uint32_t>(to->page_bytes / kChunkBytes);
  batch.sum_only = to == nullptr;
  return count;
}

template <Target kTarget>
Kernel quantizer_for(const LayerWork& layer, bool all_alike) {
  const bool half = layer.dtype == Dtype::fp16;
  if (all_alike && layer.head_dim == 128) {
    return half ? rewrite_pages<RewriteAlike<kTarget, 128, Dtype::fp16>>
                : rewrite_pages<RewriteAlike<kTarget, 128, Dtype::bf16>>;
  }
  if constexpr (kTarget == Target::int4) {
    if (all_alike && layer.head_dim == 64) {
      return half ? rewrite_pages<RewriteAlike<kTarget, 64, Dtype::fp16>>
                  : rewrite_pages<RewriteAlike<kTarget, 64, Dtype::bf16>>;
    }
  }
  return rewrite_pages<RewriteMixed<kTarget>>;
}

// The kernel for layers that are rewritten, with constants where these are all alike.
Kernel kernel_for(const LayerWork* layers, std::uint32_t count) {
  const LayerWork* first = nullptr;
  bool all_alike = true;
  for (const LayerWork* layer = layers; layer != layers + count; ++layer) {
    if (layer->from == layer->to) continue;
    if (first == nullptr) first = layer;
    all_alike = all_alike && layer->head_dim == first->head_dim && layer->dtype == first->dtype;
  }
  if (first == nullptr) return rewrite_pages<RewriteNothing>;
  if (first->to == Format::dense) return rewrite_pages<RewriteToDense>;
  if (first->to == Format::int4) return quantizer_for<Target::int4>(*first, all_alike);
  return first->to == Format::k8v4 ? quantizer_for<Target::wide>(*first, all_alike)
                                   : quantizer_for<Target::kept>(*first, all_alike);
}

// How many blocks a CTA claims at once.
std::uint32_t run_blocks(std::uint64_t blocks, std::uint64_t ctas) {
  const char* r = getenv("KVQ_RUN");
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks / ctas / 16, 1, r != nullptr ? atoi(r) : 4));
}

// Shared memory behind the buffers: a block decoded to dense, or a word a channel for the choice of kept ones.
std::uint32_t scratch_bytes(const LayerWork* layers, std::uint32_t count) {
  std::uint32_t bytes = 0;
  for (const LayerWork* layer = layers; layer != layers + count; ++layer) {
    if (layer->from == layer->to) continue;
    bytes = std::max(bytes, layer->to == Format::dense         ? layer->to_bytes
                            : kept_channels(layer->to) != 0 ? kMaxHeadDim * 4
                                                              : 0);
  }
  return bytes;
}

class DeviceTranscoder final : public Transcoder {
 public:
  explicit DeviceTranscoder(Stream stream) : stream_(stream) {}
  ~DeviceTranscoder() override {
    if (in_flight() != 0) cudaStreamSynchronize(stream_);
    cudaFree(device_);
    cudaFreeHost(pinned_);
  }

  Error allocate(std::uint32_t max_jobs, std::uint32_t batches);
  Result<std::uint32_t> launch(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to,
                               std::span<const PageJob> jobs) override;
  Result<bool> is_done(std::uint32_t ticket) override;
  void collect(std::uint32_t ticket, std::span<PageJobDone> results) override;

 private:
  struct Ticket {
    std::uint32_t jobs = 0, seen = 0;  // `seen` have reported
    bool in_flight = false;
  };

  // A ticket's part of the device's memory: the count of claimed runs and the states, then what is copied there where it
  // does not fit into the launch: layers and jobs. These have the same places in pinned memory, with the results before.
  static constexpr std::uint64_t kStatesAt = 256, kJobsAt = round_up(kMaxLayers * sizeof(LayerWork), 256);
  std::uint64_t upload_at() const { return round_up(kStatesAt + max_jobs_ * sizeof(JobState), 256); }
  std::byte* pinned(std::uint32_t ticket) const { return pinned_ + ticket * ticket_bytes_; }
  std::byte* on_device(std::uint32_t ticket) const { return device_ + ticket * ticket_bytes_; }
  JobResult* results(std::uint32_t ticket) const { return reinterpret_cast<JobResult*>(pinned(ticket)); }
  std::uint32_t in_flight() const {
    return static_cast<std::uint32_t>(
        std::count_if(tickets_.begin(), tickets_.end(), [](const Ticket& t) { return t.in_flight; }));
  }
  bool has_reported(Ticket& ticket, const JobResult* results) const;
  Error describe_jobs(const PageLayout* to, std::span<const PageJob> jobs, JobWork* work) const;
  cudaError_t start(std::uint32_t ticket, const LayerWork* layers, BatchWork& batch);

  Stream stream_;
  std::uint32_t max_jobs_ = 0, processors_ = 0, shared_bytes_ = 0, shared_bytes_all_ = 0;
  bool may_overlap_ = false;
  std::uint64_t ticket_bytes_ = 0;
  std::byte* pinned_ = nullptr;  // mapped, at the same address on the device
  std::byte* device_ = nullptr;
  std::vector<Ticket> tickets_;
};

Error DeviceTranscoder::allocate(std::uint32_t max_jobs, std::uint32_t batches) {
  static_assert(sizeof(JobResult) <= sizeof(JobState));
  max_jobs_ = max_jobs;
  ticket_bytes_ = round_up(upload_at() + kJobsAt + max_jobs * sizeof(JobWork), 256);
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
  for (const Kernel kernel : kKernels) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_));
    if (error != cudaSuccess) return driver_error(error, "transcode kernels do not run on this device");
  }
  error = cudaHostAlloc(reinterpret_cast<void**>(&pinned_), ticket_bytes_ * batches,
                        cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&device_), ticket_bytes_ * batches);
  if (error == cudaSuccess) error = cudaMemsetAsync(device_, 0, ticket_bytes_ * batches, stream_);
  if (error != cudaSuccess) return driver_error(error, "staging memory of the transcoder");
  tickets_.resize(batches);
  return {};
}

Error DeviceTranscoder::describe_jobs(const PageLayout* to, std::span<const PageJob> jobs, JobWork* work) const {
  for (const PageJob& job : jobs) {
    const std::byte* destination = to == nullptr ? nullptr : job.destination;
    if (job.source == nullptr || (to != nullptr && destination == nullptr) ||
        (reinterpret_cast<std::uintptr_t>(job.source) | reinterpret_cast<std::uintptr_t>(destination)) % kChunkBytes !=
            0) {
      return {Errc::invalid_argument, 0, "a page to transcode is null or not aligned to 16 bytes"};
    }
    *work++ = {job.source, job.destination, job.checksum, job.has_checksum};
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
  auto* layers = reinterpret_cast<LayerWork*>(pinned(ticket) + upload_at());
  const bool few = describe(geometry, from, to, layers, batch) <= kFewLayers && jobs.size() <= kFewJobs;
  if (batch.blocks_per_page == 0) return Error{Errc::wrong_layout, 0, "model has no KV heads"};
  batch.blocks = std::uint64_t{batch.blocks_per_page} * jobs.size();
  JobWork* work = few ? batch.few_jobs : reinterpret_cast<JobWork*>(pinned(ticket) + upload_at() + kJobsAt);
  if (Error error = describe_jobs(to, jobs, work); error.code != Errc::ok) return error;
  if (few) {
    std::copy_n(layers, batch.layer_count, batch.few_layers);
  } else {
    batch.layers = reinterpret_cast<const LayerWork*>(on_device(ticket) + upload_at());
    batch.jobs = reinterpret_cast<const JobWork*>(on_device(ticket) + upload_at() + kJobsAt);
  }
  std::fill_n(results(ticket), jobs.size(), JobResult{0, kPending});
  Ticket started{static_cast<std::uint32_t>(jobs.size()), 0, true};
  const cudaError_t error = jobs.empty() ? cudaSuccess : start(ticket, layers, batch);
  if (error == cudaErrorInvalidConfiguration) {
    return Error{Errc::wrong_layout, 0, "blocks of these layers need more shared memory than this GPU has"};
  }
  if (error != cudaSuccess) return driver_error(error, "launch of a transcode");
  *free = started;
  return ticket;
}

cudaError_t DeviceTranscoder::start(std::uint32_t ticket, const LayerWork* layers, BatchWork& batch) {
  const Kernel kernel = kernel_for(layers, batch.layer_count);
  const std::uint32_t scratch = scratch_bytes(layers, batch.layer_count);
  // Two buffers or more for each CTA where an SM holds as many CTAs as it may; one where blocks are that large.
  const std::uint32_t share = std::min(shared_bytes_, shared_bytes_all_ / kTranscodeCtas - 1024 - kDeclaredBytes);
  const std::uint32_t in_share = share > scratch ? (share - scratch) / batch.stage_bytes : 0;
  const std::uint32_t possible = shared_bytes_ > scratch ? (shared_bytes_ - scratch) / batch.stage_bytes : 0;
  if (possible == 0) return cudaErrorInvalidConfiguration;
  batch.stages = std::min({std::max(in_share, 2u), possible, kMaxStages});
  const std::uint32_t shared = batch.stages * batch.stage_bytes + scratch;
  batch.results = results(ticket);
  batch.claimed_runs = reinterpret_cast<std::uint32_t*>(on_device(ticket));
  batch.states = reinterpret_cast<JobState*>(on_device(ticket) + kStatesAt);

  int per_processor = 0;
  cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kTranscodeThreads + 32, shared);
  if (error != cudaSuccess) return error;
  const std::uint64_t resident = std::uint64_t{processors_} * static_cast<std::uint32_t>(std::max(per_processor, 1));
  batch.run_blocks = run_blocks(batch.blocks, resident);
  batch.runs = static_cast<std::uint32_t>((batch.blocks + batch.run_blocks - 1) / batch.run_blocks);
  if (batch.layers != nullptr) {
    const std::uint64_t jobs = batch.blocks / batch.blocks_per_page;
    error = cudaMemcpyAsync(on_device(ticket) + upload_at(), pinned(ticket) + upload_at(),
                            kJobsAt + jobs * sizeof(JobWork), cudaMemcpyHostToDevice, stream_);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(std::min<std::uint64_t>(resident, batch.runs));
  config.blockDim = kTranscodeThreads + 32;
  config.dynamicSmemBytes = shared;
  config.stream = stream_;
  config.attrs = &overlap;
  config.numAttrs = may_overlap_ && in_flight() != 0;  // what is before a first batch need not be one of ours
  return cudaLaunchKernelEx(&config, kernel, batch);
}

bool DeviceTranscoder::has_reported(Ticket& ticket, const JobResult* results) const {
  while (ticket.seen < ticket.jobs &&
         __atomic_load_n(&results[ticket.seen].code, __ATOMIC_ACQUIRE) != kPending) {
    ++ticket.seen;
  }
  return ticket.seen == ticket.jobs;
}

// A batch is seen to be done as soon as its last page has reported, a few microseconds before the stream is.
Result<bool> DeviceTranscoder::is_done(std::uint32_t ticket) {
  KVQ_ASSERT(ticket < tickets_.size() && tickets_[ticket].in_flight);
  if (has_reported(tickets_[ticket], results(ticket))) return true;
  const cudaError_t state = cudaStreamQuery(stream_);
  if (state == cudaSuccess || state == cudaErrorNotReady) return has_reported(tickets_[ticket], results(ticket));
  return driver_error(state, "transcode in flight");
}

void DeviceTranscoder::collect(std::uint32_t ticket, std::span<PageJobDone> done) {
  KVQ_ASSERT(ticket < tickets_.size() && tickets_[ticket].in_flight && done.size() == tickets_[ticket].jobs);
  const JobResult* result = results(ticket);
  for (PageJobDone& job : done) {
    job = {static_cast<Errc>(result->code), result->checksum};
    ++result;
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

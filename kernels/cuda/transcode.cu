// The transcoder's host side: checks, staging, launches, results.
//
// Invariant: a ticket's staging is written by launch() only, after collect() has returned its last results, so the copy
// to the device and the kernel never see it change. Everything is allocated in create().
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

bool quantized(Format f) {
  return f == Format::int4 || f == Format::int4_k4 || f == Format::int4_k8 || f == Format::k8v4;
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

// The table of layers that have blocks, and what is common to them.
void describe(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to, LayerWork* layers,
              BatchWork& batch) {
  for (std::uint32_t i = 0; i < geometry.layers; ++i) {
    const LayerSpec& spec = geometry.layer[i];
    if (spec.kv_heads == 0) continue;
    const LayerPlace& a = from.layer[i];
    LayerWork& work = layers[batch.layer_count++];
    work = {};
    work.from_chunk = static_cast<std::uint32_t>(a.offset_bytes / kChunkBytes);
    work.from_bytes = static_cast<std::uint32_t>(a.head_bytes);
    work.kv_heads = spec.kv_heads;
    work.head_dim = spec.head_dim;
    work.dtype = spec.dtype;
    work.from = work.to = a.format;
    batch.from_end_chunk = work.from_chunk + spec.kv_heads * (work.from_bytes / kChunkBytes);
    batch.blocks_per_page += spec.kv_heads;
    batch.stage_bytes = std::max(batch.stage_bytes, work.from_bytes);
    if (to == nullptr) continue;
    const LayerPlace& b = to->layer[i];
    work.to_chunk = static_cast<std::uint32_t>(b.offset_bytes / kChunkBytes);
    work.to_bytes = static_cast<std::uint32_t>(b.head_bytes);
    work.to = b.format;
    batch.to_end_chunk = work.to_chunk + spec.kv_heads * (work.to_bytes / kChunkBytes);
  }
  const auto as_first = [&](const LayerWork& layer) { return layer.kv_heads == layers[0].kv_heads; };
  batch.heads_everywhere = std::all_of(layers, layers + batch.layer_count, as_first) ? layers[0].kv_heads : 0;
  batch.from_chunks = static_cast<std::uint32_t>(from.page_bytes / kChunkBytes);
  batch.to_chunks = to == nullptr ? 0 : static_cast<std::uint32_t>(to->page_bytes / kChunkBytes);
  batch.sum_only = to == nullptr;
}

// The kernel with constants where every rewritten layer is alike, and else the general one.
Kernel kernel_for(const LayerWork* layers, std::uint32_t count) {
  const LayerWork* rewritten = nullptr;
  for (const LayerWork* layer = layers; layer != layers + count; ++layer) {
    if (layer->from == layer->to && layer->from == Format::dense && layer->to_bytes != 0) continue;
    if (layer->from != Format::dense || layer->to != Format::int4) return rewrite_pages<RewriteAny>;
    if (rewritten != nullptr && (rewritten->head_dim != layer->head_dim || rewritten->dtype != layer->dtype)) {
      return rewrite_pages<RewriteAny>;
    }
    rewritten = layer;
  }
  if (rewritten == nullptr) return rewrite_pages<RewriteAny>;
  const bool half = rewritten->dtype == Dtype::fp16;
  if (rewritten->head_dim == 128) {
    return half ? rewrite_pages<RewriteInt4<128, Dtype::fp16>> : rewrite_pages<RewriteInt4<128, Dtype::bf16>>;
  }
  if (rewritten->head_dim == 64) {
    return half ? rewrite_pages<RewriteInt4<64, Dtype::fp16>> : rewrite_pages<RewriteInt4<64, Dtype::bf16>>;
  }
  return rewrite_pages<RewriteAny>;
}

// How many blocks a CTA claims at once: an equal share of a small batch, since a claim costs as much as two blocks; of
// a large one short runs, which level out SMs.
std::uint32_t run_blocks(std::uint64_t blocks, std::uint64_t ctas) {
  const std::uint64_t share = (blocks + ctas - 1) / ctas;
  return static_cast<std::uint32_t>(share < 40 ? share : std::clamp<std::uint64_t>(share / 16, 4, 16));
}

// Shared memory behind the buffers: a block decoded to dense, or the choice of channels.
std::uint32_t scratch_bytes(const LayerWork* layers, std::uint32_t count) {
  std::uint32_t bytes = 0;
  for (const LayerWork* layer = layers; layer != layers + count; ++layer) {
    if (layer->to_bytes == 0 || layer->from == layer->to) continue;
    const auto needed = layer->to == Format::dense ? layer->to_bytes : static_cast<std::uint32_t>(sizeof(KeptChannels));
    bytes = std::max(bytes, needed);
  }
  return bytes;
}

class DeviceTranscoder final : public Transcoder {
 public:
  explicit DeviceTranscoder(Stream stream) : stream_(stream) {}
  ~DeviceTranscoder() override {
    for (Ticket& ticket : tickets_) {
      if (ticket.in_flight) cudaEventSynchronize(ticket.done);
      cudaEventDestroy(ticket.done);
    }
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
    cudaEvent_t done = nullptr;
    std::uint32_t jobs = 0;
    bool in_flight = false;
  };

  // A ticket's part of the staging: the count of claimed runs and the layers, then jobs; the results are pinned only.
  static constexpr std::uint64_t kLayersAt = 64, kJobsAt = round_up(kLayersAt + kMaxLayers * sizeof(LayerWork), 256);
  std::uint64_t upload_bytes(std::uint64_t jobs) const { return kJobsAt + jobs * sizeof(JobWork); }
  std::byte* pinned(std::uint32_t ticket) const { return pinned_ + ticket * ticket_bytes_; }
  std::byte* on_device(std::uint32_t ticket) const { return device_ + ticket * ticket_bytes_; }
  JobResult* results(std::uint32_t ticket) const {
    return reinterpret_cast<JobResult*>(pinned(ticket) + upload_bytes(max_jobs_));
  }
  cudaError_t start(std::uint32_t ticket, BatchWork& batch);

  Stream stream_;
  std::uint32_t max_jobs_ = 0, processors_ = 0, shared_bytes_ = 0, shared_bytes_all_ = 0;
  std::uint64_t ticket_bytes_ = 0;
  std::byte* pinned_ = nullptr;  // mapped, at the same address on the device
  std::byte* device_ = nullptr;
  std::vector<Ticket> tickets_;
};

Error DeviceTranscoder::allocate(std::uint32_t max_jobs, std::uint32_t batches) {
  max_jobs_ = max_jobs;
  ticket_bytes_ = round_up(upload_bytes(max_jobs) + max_jobs * sizeof(JobResult), 256);
  int device = 0, processors = 0, shared = 0, shared_all = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&shared_all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return driver_error(error, "no CUDA device for the transcoder");
  processors_ = static_cast<std::uint32_t>(processors);
  shared_bytes_ = static_cast<std::uint32_t>(shared) - 1024;  // less what kernels declare themselves
  shared_bytes_all_ = static_cast<std::uint32_t>(shared_all);
  for (const Kernel kernel : {rewrite_pages<RewriteAny>, rewrite_pages<RewriteInt4<128, Dtype::fp16>>,
                              rewrite_pages<RewriteInt4<128, Dtype::bf16>>, rewrite_pages<RewriteInt4<64, Dtype::fp16>>,
                              rewrite_pages<RewriteInt4<64, Dtype::bf16>>}) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_));
    if (error != cudaSuccess) return driver_error(error, "transcode kernels do not run on this device");
  }
  error = cudaHostAlloc(reinterpret_cast<void**>(&pinned_), ticket_bytes_ * batches,
                        cudaHostAllocMapped | cudaHostAllocPortable);
  if (error == cudaSuccess) error = cudaMalloc(reinterpret_cast<void**>(&device_), ticket_bytes_ * batches);
  if (error != cudaSuccess) return driver_error(error, "staging memory of the transcoder");
  tickets_.reserve(batches);
  for (std::uint32_t i = 0; i < batches; ++i) {
    Ticket ticket;
    error = cudaEventCreateWithFlags(&ticket.done, cudaEventDisableTiming);
    if (error != cudaSuccess) return driver_error(error, "event of the transcoder");
    tickets_.push_back(ticket);
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
  describe(geometry, from, to, reinterpret_cast<LayerWork*>(pinned(ticket) + kLayersAt), batch);
  if (batch.blocks_per_page == 0) return Error{Errc::wrong_layout, 0, "model has no KV heads"};
  batch.blocks = std::uint64_t{batch.blocks_per_page} * jobs.size();
  auto* work = reinterpret_cast<JobWork*>(pinned(ticket) + kJobsAt);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const PageJob& job = jobs[i];
    const std::byte* destination = to == nullptr ? nullptr : job.destination;
    if (job.source == nullptr || (to != nullptr && destination == nullptr) ||
        (reinterpret_cast<std::uintptr_t>(job.source) | reinterpret_cast<std::uintptr_t>(destination)) % kChunkBytes !=
            0) {
      return Error{Errc::invalid_argument, 0, "a page to transcode is null or not aligned to 16 bytes"};
    }
    work[i] = {job.source, job.destination, job.checksum, job.has_checksum};
  }
  free->jobs = static_cast<std::uint32_t>(jobs.size());
  cudaError_t error = jobs.empty() ? cudaSuccess : start(ticket, batch);
  if (error == cudaErrorInvalidConfiguration) {
    return Error{Errc::wrong_layout, 0, "blocks of these layers need more shared memory than this GPU has"};
  }
  if (error == cudaSuccess) error = cudaEventRecord(free->done, stream_);
  if (error != cudaSuccess) return driver_error(error, "launch of a transcode");
  free->in_flight = true;
  return ticket;
}

cudaError_t DeviceTranscoder::start(std::uint32_t ticket, BatchWork& batch) {
  const auto* layers = reinterpret_cast<const LayerWork*>(pinned(ticket) + kLayersAt);
  const std::uint32_t jobs = tickets_[ticket].jobs;
  const Kernel kernel = kernel_for(layers, batch.layer_count);
  const std::uint32_t scratch = scratch_bytes(layers, batch.layer_count);
  // Two buffers or more for each CTA where an SM holds two or three of them; one where blocks are that large.
  const std::uint32_t share = std::min(shared_bytes_, shared_bytes_all_ / 3 - 2048);
  const std::uint32_t in_share = share > scratch ? (share - scratch) / batch.stage_bytes : 0;
  const std::uint32_t possible = (shared_bytes_ - scratch) / batch.stage_bytes;
  if (possible == 0) return cudaErrorInvalidConfiguration;
  batch.stages = std::min({std::max(in_share, 2u), possible, kMaxStages});
  const std::uint32_t shared = batch.stages * batch.stage_bytes + scratch;
  batch.layers = reinterpret_cast<const LayerWork*>(on_device(ticket) + kLayersAt);
  batch.jobs = reinterpret_cast<JobWork*>(on_device(ticket) + kJobsAt);
  batch.results = results(ticket);
  batch.claimed_runs = reinterpret_cast<std::uint32_t*>(on_device(ticket));
  std::memset(pinned(ticket), 0, sizeof(*batch.claimed_runs));

  int per_processor = 0;
  cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kTranscodeThreads, shared);
  if (error != cudaSuccess) return error;
  const std::uint64_t resident = std::uint64_t{processors_} * static_cast<std::uint32_t>(std::max(per_processor, 1));
  batch.run_blocks = run_blocks(batch.blocks, resident);
  const std::uint64_t runs = (batch.blocks + batch.run_blocks - 1) / batch.run_blocks;
  error = cudaMemcpyAsync(on_device(ticket), pinned(ticket), upload_bytes(jobs), cudaMemcpyHostToDevice, stream_);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(std::min(resident, runs)), kTranscodeThreads, shared, stream_>>>(batch);
  return cudaGetLastError();
}

Result<bool> DeviceTranscoder::is_done(std::uint32_t ticket) {
  KVQ_ASSERT(ticket < tickets_.size() && tickets_[ticket].in_flight);
  const cudaError_t state = cudaEventQuery(tickets_[ticket].done);
  if (state == cudaSuccess) return true;
  if (state == cudaErrorNotReady) return false;
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

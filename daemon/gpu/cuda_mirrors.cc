// A batch is sorted by mirror and page, so that entries in a row can be copied as one and each entry is written once,
// with its newest value. Two batches in flight keep the stream fed; more would only write older values.
#include "daemon/gpu/cuda_mirrors.h"

#include <algorithm>
#include <functional>

#include "kernels/cuda/entries.h"

namespace kvq::gpu {

Result<std::unique_ptr<CudaMirrors>> CudaMirrors::create(const CudaContext& context, SlabMemory& memory) {
  std::unique_ptr<CudaMirrors> out(new CudaMirrors(context, memory));
  const cuda::Driver& d = context.driver();
  constexpr int kHighest = -5;  // cut to what the GPU has
  CUresult code = d.stream_create_with_priority(&out->stream_, CU_STREAM_NON_BLOCKING, kHighest);
  for (Batch& batch : out->batches_) {
    if (!code) code = d.event_create(&batch.passed, CU_EVENT_DISABLE_TIMING);
  }
  if (code) return cuda::driver_error(code, "the stream of directory entries");
  return out;
}

CudaMirrors::~CudaMirrors() {
  const cuda::Driver& d = context_.driver();
  if (stream_ != nullptr) d.stream_synchronize(stream_);  // waits: the mappings go next
  for (Batch& batch : batches_) {
    if (batch.passed != nullptr) d.event_destroy(batch.passed);
  }
  if (stream_ != nullptr) d.stream_destroy(stream_);
}

std::uint64_t CudaMirrors::bytes_of(std::uint32_t entries) const {
  return round_up(std::uint64_t{entries} * sizeof(std::uint64_t), memory_.granularity());
}

Result<Descriptor> CudaMirrors::make(TenantId tenant, std::uint32_t entries) {
  Result<SlabMemory::NewBlock> made = memory_.make_block(bytes_of(entries));
  if (!made) return made.error();
  place(tenant, entries, std::move(made->block));
  return std::move(made->exported);
}

Result<void> CudaMirrors::adopt(TenantId tenant, std::uint32_t entries, const Descriptor& file) {
  Result<std::unique_ptr<SlabMemory::Block>> block = memory_.adopt_block(bytes_of(entries), file);
  if (!block) return block.error();
  place(tenant, entries, std::move(*block));
  return {};
}

void CudaMirrors::place(TenantId tenant, std::uint32_t entries, std::unique_ptr<SlabMemory::Block> block) {
  if (const auto old = mirrors_.find(raw(tenant)); old != mirrors_.end()) {
    replaced_.push_back(std::move(old->second));
    mirrors_.erase(old);
  }
  mirrors_.emplace(raw(tenant), Mirror{entries, std::move(block)});
}

Result<void> CudaMirrors::write(std::span<const EntryWrite> writes) {
  if (!health_) return health_;
  const std::size_t before = waiting_.size();
  for (const EntryWrite& w : writes) {
    const auto mirror = mirrors_.find(w.tenant);
    if (mirror == mirrors_.end() || w.page >= mirror->second.entries) {
      waiting_.resize(before);
      return Error{Errc::invalid_argument, 0, "a directory entry for a mirror that is not there"};
    }
    auto* const entries = reinterpret_cast<std::uint64_t*>(mirror->second.block->base());
    waiting_.push_back({entries, w.page, w.sequence, w.entry});
  }
  advance();
  return health_;
}

std::uint64_t CudaMirrors::written() {
  advance();
  return written_;
}

// Takes note of the batches that have passed, oldest first, and launches the next ones.
void CudaMirrors::advance() {
  bool running = false;
  for (std::uint32_t i = 0; i < kBatches && health_; ++i) {
    Batch& batch = batches_[(next_ + i) % kBatches];
    if (!batch.running) continue;
    const CUresult code = context_.driver().event_query(batch.passed);
    if (code == CUDA_ERROR_NOT_READY) {
      running = true;
      break;
    }
    if (code) {
      health_ = Error{Errc::context_lost, code, "writing directory entries"};
      return;
    }
    batch.running = false;
    written_ = batch.last;
  }
  if (!running && waiting_.empty()) replaced_.clear();
  while (health_ && !waiting_.empty() && !batches_[next_].running) {
    health_ = launch(batches_[next_]);
    next_ = (next_ + 1) % kBatches;
  }
}

Result<void> CudaMirrors::launch(Batch& batch) {
  const std::size_t count = std::min<std::size_t>(waiting_.size(), kBatchEntries);
  const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<Waiting> writes(waiting_.begin(), end);
  waiting_.erase(waiting_.begin(), end);
  batch.last = writes.back().sequence;
  std::stable_sort(writes.begin(), writes.end(), [](const Waiting& a, const Waiting& b) {
    return std::less<>()(a.entries, b.entries) || (a.entries == b.entries && a.page < b.page);
  });
  for (auto first = writes.begin(); first != writes.end();) {
    const auto last = std::find_if(first, writes.end(), [&](const Waiting& w) { return w.entries != first->entries; });
    if (const Result<void> written = write_to_one({first, last}); !written) {
      return Error{Errc::context_lost, written.error().native, written.error().context};
    }
    first = last;
  }
  if (const CUresult code = context_.driver().event_record(batch.passed, stream_)) {
    return Error{Errc::context_lost, code, "cuEventRecord"};
  }
  batch.running = true;
  return {};
}

// Of one mirror, sorted by page, older values first.
Result<void> CudaMirrors::write_to_one(std::span<const Waiting> writes) {
  std::vector<cuda::EntryWrite> newest;
  for (const Waiting& w : writes) {
    if (!newest.empty() && newest.back().index == w.page) newest.pop_back();
    newest.push_back({w.page, w.entry});
  }
  return cuda::write_entries(writes.front().entries, newest, stream_);
}

}  // namespace kvq::gpu

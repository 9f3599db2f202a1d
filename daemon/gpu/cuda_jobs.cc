// How large a batch is: beside other processes' work each batch costs them one switch of contexts, about 0.4 ms
// whatever its size, so batches are large and a little late. Inside MPS there is no switch, and small batches leave the
// GPU's units to others sooner.
#include "daemon/gpu/cuda_jobs.h"

#include <algorithm>

namespace kvq::gpu {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kLargeBatch = 256, kSmallBatch = 16;  // pages
constexpr std::uint32_t kFullEnough = 64;                     // outside MPS: launched at once
constexpr auto kPatience = 3ms;                               // outside MPS: how long a smaller batch waits for more
constexpr std::uint32_t kBatchesInFlight = 2;                 // one runs, one is ready to follow it

std::uint64_t key_of(const Job& job) {
  return (std::uint64_t{job.model} << 16) | (std::uint64_t{static_cast<std::uint8_t>(job.from)} << 8) |
         static_cast<std::uint8_t>(job.to);
}

bool is_format(Format f) { return f != Format::none && static_cast<std::uint32_t>(f) < kFormatCount; }

JobDone refused(const Job& job, const Error& error) { return {job.id, error.code, error.native, 0}; }

}  // namespace

Result<std::unique_ptr<CudaJobs>> CudaJobs::create(const CudaContext& context, Locate locate) {
  std::unique_ptr<CudaJobs> out(new CudaJobs(context, std::move(locate)));
  constexpr int kLowest = 0;  // priorities are numbers from 0 down
  if (const CUresult code =
          context.driver().stream_create_with_priority(&out->stream_, CU_STREAM_NON_BLOCKING, kLowest)) {
    return cuda::driver_error(code, "cuStreamCreateWithPriority");
  }
  auto transcoder = cuda::Transcoder::create(out->batch_jobs(), kBatchesInFlight, out->stream_);
  if (!transcoder) return transcoder.error();
  out->transcoder_ = std::move(*transcoder);
  return out;
}

CudaJobs::~CudaJobs() {
  transcoder_.reset();
  if (stream_ != nullptr) context_.driver().stream_destroy(stream_);
}

std::uint32_t CudaJobs::batch_jobs() const { return context_.in_mps() ? kSmallBatch : kLargeBatch; }

void CudaJobs::add_model(std::uint32_t number, const ModelGeometry& geometry) {
  auto model = std::make_unique<Model>();
  model->geometry = geometry;
  for (std::uint32_t f = 1; f < kFormatCount; ++f) model->layout[f] = make_layout(geometry, static_cast<Format>(f));
  models_[number] = std::move(model);
}

void CudaJobs::submit(std::span<const Job> jobs) {
  for (const Job& job : jobs) {
    const std::uint64_t key = key_of(job);
    auto group = std::find_if(groups_.begin(), groups_.end(), [key](const Group& g) { return g.key == key; });
    if (group == groups_.end()) group = groups_.insert(groups_.end(), Group{key, {}, Clock::now()});
    group->jobs.push_back(job);
  }
}

bool CudaJobs::is_due(const Group& group, Clock::time_point now) const {
  return context_.in_mps() || group.jobs.size() >= kFullEnough || now - group.oldest >= kPatience;
}

Result<bool> CudaJobs::poll(std::vector<JobDone>& done) {
  if (const Result<void> collected = collect(done); !collected) return collected.error();
  const auto now = Clock::now();
  for (std::size_t i = 0; i < groups_.size() && running_.size() < kBatchesInFlight;) {
    if (!is_due(groups_[i], now)) {
      ++i;
      continue;
    }
    if (const Result<void> launched = launch(groups_[i], done); !launched) return launched.error();
    Group group = std::move(groups_[i]);
    groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(i));
    if (!group.jobs.empty()) groups_.push_back(std::move(group));  // the other groups come first; it stays due
  }
  return !groups_.empty() || !running_.empty();
}

Result<void> CudaJobs::collect(std::vector<JobDone>& done) {
  while (!running_.empty()) {
    const Batch& batch = running_.front();
    const Result<bool> over = transcoder_->is_done(batch.ticket);
    if (!over) return Error{Errc::context_lost, over.error().native, over.error().context};
    if (!*over) break;
    std::vector<cuda::PageJobDone> results(batch.ids.size());
    transcoder_->collect(batch.ticket, results);
    for (std::size_t i = 0; i < results.size(); ++i) {
      done.push_back({batch.ids[i], results[i].code, 0, results[i].checksum});
    }
    running_.pop_front();
  }
  return {};
}

// Takes up to one batch of jobs from the group.
Result<void> CudaJobs::launch(Group& group, std::vector<JobDone>& done) {
  std::vector<cuda::PageJob> pages;
  std::vector<Job> jobs;
  const Job first = group.jobs.front();
  const auto model = models_.find(first.model);
  const bool sums_only = first.to == Format::none;
  const bool known = model != models_.end() && is_format(first.from) && (sums_only || is_format(first.to));
  const PageLayout* from = known ? &model->second->layout[static_cast<std::size_t>(first.from)] : nullptr;
  const PageLayout* to = known && !sums_only ? &model->second->layout[static_cast<std::size_t>(first.to)] : nullptr;
  while (!group.jobs.empty() && pages.size() < batch_jobs()) {
    const Job job = group.jobs.front();
    group.jobs.pop_front();
    cuda::PageJob page;
    page.source = known ? locate_(job.source_bytes, from->page_bytes) : nullptr;
    page.destination = to != nullptr ? locate_(job.destination_bytes, to->page_bytes) : nullptr;
    page.checksum = job.checksum;
    page.has_checksum = job.has_checksum != 0;
    if (page.source == nullptr || (page.destination == nullptr && !sums_only)) {
      done.push_back(refused(job, {Errc::invalid_argument, 0, ""}));
      continue;
    }
    pages.push_back(page);
    jobs.push_back(job);
  }
  if (pages.empty()) return {};
  const Result<std::uint32_t> ticket = transcoder_->launch(model->second->geometry, *from, to, pages);
  if (!ticket) {
    const Error& e = ticket.error();
    if (e.code == Errc::context_lost || cuda::is_context_lost(e.native))
      return Error{Errc::context_lost, e.native, e.context};
    for (const Job& job : jobs) done.push_back(refused(job, e));
    return {};
  }
  Batch batch{*ticket, {}};
  for (const Job& job : jobs) batch.ids.push_back(job.id);
  running_.push_back(std::move(batch));
  return {};
}

}  // namespace kvq::gpu

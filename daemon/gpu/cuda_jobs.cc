// A batch is of one group, so a burst of the pace is as many batches as groups wait; those that find no ticket follow
// as soon as one is free.
#include "daemon/gpu/cuda_jobs.h"

#include <algorithm>
#include <chrono>

#include "kernels/logit_noise.h"

namespace kvq::gpu {
namespace {

using namespace std::chrono_literals;

// Together all that kvqd may have submitted, so a burst is limited by the pace alone.
constexpr std::uint32_t kBatchesInFlight = 4, kBatchJobs = kJobsInFlight / kBatchesInFlight;
constexpr PaceTime kLook = 100us;  // while a batch runs

std::uint64_t key_of(const Job& job) {
  return (std::uint64_t{job.model} << 16) | (std::uint64_t{static_cast<std::uint8_t>(job.from)} << 8) |
         static_cast<std::uint8_t>(job.to);
}

bool is_format(Format f) { return f != Format::none && static_cast<std::uint32_t>(f) < kFormatCount; }

PaceTime now() { return std::chrono::steady_clock::now().time_since_epoch(); }

JobDone refused(const Job& job, const Error& error) { return {job.id, error.code, error.native, 0}; }

}  // namespace

CudaJobs::CudaJobs(const CudaContext& context, Locate locate)
    : context_(context), locate_(std::move(locate)), pace_(pace_rule(context.in_mps(), context.gpu_bytes_per_s())) {}

Result<std::unique_ptr<CudaJobs>> CudaJobs::create(const CudaContext& context, Locate locate) {
  std::unique_ptr<CudaJobs> out(new CudaJobs(context, std::move(locate)));
  constexpr int kLowest = 0;  // priorities are numbers from 0 down
  if (const CUresult code =
          context.driver().stream_create_with_priority(&out->stream_, CU_STREAM_NON_BLOCKING, kLowest)) {
    return cuda::driver_error(code, "cuStreamCreateWithPriority");
  }
  auto transcoder = cuda::Transcoder::create(kBatchJobs, kBatchesInFlight, out->stream_);
  if (!transcoder) return transcoder.error();
  out->transcoder_ = std::move(*transcoder);
  return out;
}

CudaJobs::~CudaJobs() {
  transcoder_.reset();
  if (stream_ != nullptr) context_.driver().stream_destroy(stream_);
}

void CudaJobs::add_model(std::uint32_t number, const ModelGeometry& geometry) {
  auto model = std::make_unique<Model>();
  model->geometry = geometry;
  for (std::uint32_t f = 1; f < kFormatCount; ++f) model->layout[f] = make_layout(geometry, static_cast<Format>(f));
  models_[number] = std::move(model);
}

// Never 0: what is no page counts too, so that its turn to be refused comes.
std::uint64_t CudaJobs::source_bytes(const Job& job) const {
  const auto model = models_.find(job.model);
  const bool known = model != models_.end() && is_format(job.from);
  return known ? std::max<std::uint64_t>(model->second->layout[static_cast<std::size_t>(job.from)].page_bytes, 1) : 1;
}

void CudaJobs::submit(std::span<const Job> jobs) {
  for (const Job& job : jobs) {
    const std::uint64_t key = key_of(job);
    auto group = std::find_if(groups_.begin(), groups_.end(), [key](const Group& g) { return g.key == key; });
    if (group == groups_.end()) group = groups_.insert(groups_.end(), Group{key, source_bytes(job), {}, now()});
    group->jobs.push_back(job);
  }
}

BatchPace::Waiting CudaJobs::waiting() const {
  BatchPace::Waiting out{.oldest = PaceTime::max(), .urgent = urgent_};
  for (const Group& group : groups_) {
    out.bytes += group.page_bytes * group.jobs.size();
    out.oldest = std::min(out.oldest, group.oldest);
  }
  return out;
}

Result<bool> CudaJobs::poll(std::vector<JobDone>& done) {
  bool runs = !running_.empty();  // at the last look: what its tickets kept waiting belongs to the same burst
  if (const Result<void> collected = collect(done); !collected) return collected.error();
  while (!groups_.empty() && running_.size() < kBatchesInFlight) {
    const std::uint64_t room = pace_.room(now(), waiting(), runs);
    if (room == 0) break;
    Group group = std::move(groups_.front());
    groups_.pop_front();
    const std::size_t waited = group.jobs.size();
    const std::uint64_t fit = (room + group.page_bytes - 1) / group.page_bytes;
    if (const Result<void> launched = launch(group, fit, done); !launched) return launched.error();
    pace_.launched((waited - group.jobs.size()) * group.page_bytes);
    if (!group.jobs.empty()) groups_.push_back(std::move(group));  // the other groups come first
    runs = true;
  }
  return !groups_.empty() || !running_.empty();
}

PaceTime CudaJobs::quiet() const {
  if (!running_.empty()) return kLook;
  return groups_.empty() ? PaceTime::max() : std::max(pace_.due(waiting()) - now(), PaceTime(0));
}

Result<void> CudaJobs::collect(std::vector<JobDone>& done) {
  while (!running_.empty()) {
    const Batch& batch = running_.front();
    const Result<bool> over = transcoder_->is_done(batch.ticket);
    if (!over) return Error{Errc::context_lost, over.error().native, over.error().context};
    if (!*over) break;
    std::vector<cuda::PageJobDone> results(batch.ids.size());
    transcoder_->collect(batch.ticket, results);
    const std::size_t first = done.size();
    for (std::size_t i = 0; i < results.size(); ++i) {
      done.push_back({batch.ids[i], results[i].code, 0, results[i].checksum});
    }
    for (const Measured& m : batch.measured) {
      if (results[m.job].code != Errc::ok) continue;
      const Result<float> noise = measure(m);
      if (!noise) return noise.error();
      done[first + m.job].noise = *noise;
    }
    running_.pop_front();
  }
  return {};
}

Result<float> CudaJobs::measure(const Measured& m) {
  before_.resize(m.dense->head_bytes * m.spec->kv_heads);
  after_.resize(m.cold->head_bytes * m.spec->kv_heads);
  const auto read = [&](std::vector<std::byte>& to, const std::byte* from) {
    return context_.driver().memcpy_dtoh(to.data(), reinterpret_cast<CUdeviceptr>(from), to.size());
  };
  CUresult code = read(before_, m.before);
  if (code == CUDA_SUCCESS) code = read(after_, m.after);
  if (code != CUDA_SUCCESS) return Error{Errc::context_lost, code, "reading a page back"};
  return logit_noise(*m.spec, *m.dense, before_.data(), *m.cold, after_.data());
}

// Takes up to one batch of jobs from the group.
Result<void> CudaJobs::launch(Group& group, std::uint64_t most_jobs, std::vector<JobDone>& done) {
  std::vector<cuda::PageJob> pages;
  std::vector<Job> jobs;
  std::vector<Measured> measured;
  const Job first = group.jobs.front();
  const auto model = models_.find(first.model);
  const bool sums_only = first.to == Format::none;
  const bool known = model != models_.end() && is_format(first.from) && (sums_only || is_format(first.to));
  const PageLayout* from = known ? &model->second->layout[static_cast<std::size_t>(first.from)] : nullptr;
  const PageLayout* to = known && !sums_only ? &model->second->layout[static_cast<std::size_t>(first.to)] : nullptr;
  for (std::uint64_t most = std::min<std::uint64_t>(most_jobs, kBatchJobs); most > 0 && !group.jobs.empty(); --most) {
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
    if (job.measured < model->second->geometry.layers && !sums_only) {
      const LayerPlace &dense = from->layer[job.measured], &cold = to->layer[job.measured];
      measured.push_back({pages.size(), &model->second->geometry.layer[job.measured], &dense, &cold,
                          page.source + dense.offset_bytes, page.destination + cold.offset_bytes});
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
  Batch batch{*ticket, {}, std::move(measured)};
  for (const Job& job : jobs) batch.ids.push_back(job.id);
  running_.push_back(std::move(batch));
  return {};
}

}  // namespace kvq::gpu

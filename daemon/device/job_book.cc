// Geometries travel once per worker; jobs name them by number.
#include "daemon/device/job_book.h"

#include <algorithm>
#include <utility>

namespace kvq {
namespace {

const char* why_failed(Errc code) {
  switch (code) {
    case Errc::invalid_argument:
      return "values that the format cannot hold";
    case Errc::lost_page:
      return "its bytes do not fit its checksum";
    case Errc::wrong_layout:
      return "the GPU worker does not know this layout";
    default:
      return "the GPU worker could not do it";
  }
}

}  // namespace

void JobBook::send(WorkerLink& link) {
  while (!waiting_.empty() && sent_.size() < gpu::kJobsInFlight) {
    const TranscodeJob& job = waiting_.front();
    const gpu::Job line{.id = job.id,
                        .model = model_number(link, *job.geometry),
                        .from = job.from->format,
                        .to = job.to == nullptr ? Format::none : job.to->format,
                        .has_checksum = static_cast<std::uint8_t>(job.checksum ? 1 : 0),
                        .measured = job.measured.value_or(gpu::kNoLayer),
                        .source_bytes = job.source_bytes,
                        .destination_bytes = job.destination_bytes,
                        .checksum = job.checksum.value_or(0)};
    if (!link.push_job(line)) return;
    sent_.insert(job.id);
    waiting_.pop_front();
  }
}

void JobBook::receive(WorkerLink& link) {
  gpu::JobDone done;
  while (link.pop_done(done)) {
    if (sent_.erase(done.id) == 0) continue;
    TranscodeDone out{.id = done.id, .checksum = done.checksum};
    if (done.noise != gpu::kNotMeasured) out.noise = done.noise;
    if (done.code != Errc::ok) out.error = {done.code, done.native, why_failed(done.code)};
    answered_.push_back(out);
  }
}

void JobBook::take(std::vector<TranscodeDone>& done) {
  done.insert(done.end(), answered_.begin(), answered_.end());
  answered_.clear();
}

void JobBook::restart(WorkerLink& link) {
  for (std::uint32_t i = 0; i < models_.size(); ++i) send_model(link, i);
}

void JobBook::fail_all() {
  const Error lost{Errc::context_lost, 0, "the GPU worker ended before it was done"};
  for (const std::uint64_t id : std::exchange(sent_, {})) answered_.push_back({.id = id, .error = lost});
  for (const TranscodeJob& job : std::exchange(waiting_, {})) answered_.push_back({.id = job.id, .error = lost});
}

std::uint32_t JobBook::model_number(WorkerLink& link, const ModelGeometry& geometry) {
  if (last_model_ < models_.size() && models_[last_model_] == geometry) return last_model_;
  const auto found = std::find(models_.begin(), models_.end(), geometry);
  last_model_ = static_cast<std::uint32_t>(found - models_.begin());
  if (found == models_.end()) {
    models_.push_back(geometry);
    send_model(link, last_model_);
  }
  return last_model_;
}

void JobBook::send_model(WorkerLink& link, std::uint32_t number) {
  const gpu::Model model{models_[number]};
  link.socket().send({.kind = gpu::MessageKind::model, .index = number}, -1, std::as_bytes(std::span(&model, 1)));
}

}  // namespace kvq

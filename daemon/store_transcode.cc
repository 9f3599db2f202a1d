// Transcodes: the one way in which a page changes its format or its slot.
//
// Invariant: the destination is taken first and named by nobody until the job is done; then the new entry is published
// and the old slot retired. A job that fails frees its destination, and the page is where and what it was.
//
// Jobs in flight never depend on one another, so a device may run them at the same time:
// - Only a sealed page starts a job, and no other while it is transcoding: nobody reads a destination before its job
// has
//   been answered, since until then no record names it.
// - A slot is taken as a destination when it is free: of no page, retired, or waiting in limbo. A source is retired
// when
//   its job has been answered, a destination given back then, never earlier.
// - Checks only read, and do not hold their slot: it may be taken and written meanwhile. That harms no page, and what
//   such a check says is not believed (store_integrity.cc).
#include "daemon/store_state.h"

namespace kvq {
namespace {

constexpr std::uint64_t kMeasureMs = 200;  // between two measured pages

}  // namespace

std::optional<std::uint64_t> StoreState::checksum_of(const PageRecord& r) {
  return (r.flags & kPageHasChecksum) != 0 ? std::optional(r.checksum) : std::nullopt;
}

// One layer of one page now and again, each layer in its turn: how much quantizing costs, at next to no cost itself.
std::optional<std::uint16_t> StoreState::next_measured(const PageRecord& r, Format to) {
  if (r.format != Format::dense || to == Format::dense || now_ms_ < measure_at_ms_) return std::nullopt;
  const PageLayout& cold = layouts_->layout(r.model, to);
  for (std::uint32_t i = 0; i < layouts_->geometry(r.model).layers; ++i) {
    const auto layer = static_cast<std::uint16_t>(++last_measured_ % layouts_->geometry(r.model).layers);
    if (cold.layer[layer].format == Format::dense) continue;  // kept dense by its model
    measure_at_ms_ = now_ms_ + kMeasureMs;
    count_layers(layouts_->geometry(r.model));  // of cached pages that were taken over, no session may be left
    return layer;
  }
  return std::nullopt;
}

// False: no slot for it now. `leave`: the slab that a compaction empties.
bool StoreState::start_transcode(Tenant& t, PageId page, Format to, std::optional<SlabId> leave) {
  const PageRecord& r = t.pages->record(page);
  KVQ_ASSERT(r.state == PageState::sealed && t.pages->use(page).immobile == 0);
  const std::optional<SlotRef> slot = pool_.take(t.id, Layouts::id(r.model, to), page, leave);
  if (!slot) return false;
  const SlotRef from{r.slab, r.slot};
  const std::optional<std::uint16_t> measured = next_measured(r, to);
  const Job job{.tenant = t.id,
                .page = page,
                .from = from,
                .to = *slot,
                .started_ms = now_ms_,
                .measured = measured,
                .format = to,
                .moves = to == r.format};
  unsubmitted_.push_back({.id = ++last_job_,
                          .geometry = &layouts_->geometry(r.model),
                          .from = &layouts_->layout(r.model, r.format),
                          .to = &layouts_->layout(r.model, to),
                          .source_bytes = pool_.offset_bytes(from),
                          .destination_bytes = pool_.offset_bytes(*slot),
                          .checksum = checksum_of(r),
                          .measured = measured});
  jobs_.emplace(last_job_, job);
  pool_.set_leaving(from, true);
  t.leaving_bytes += layouts_->layout(r.model, r.format).page_bytes;
  t.pages->move(page, PageState::transcoding);
  if (to != Format::dense) t.pages->set_turns_cold(page, true);
  kill_point(KillPoint::transcode_started);
  commit();
  return true;
}

void StoreState::submit_jobs() {
  device_.set_urgent(is_urgent());
  if (unsubmitted_.empty()) return;
  device_.submit(unsubmitted_);
  unsubmitted_.clear();
  kill_point(KillPoint::transcode_submitted);
}

void StoreState::finish_jobs(TickReport& report) {
  done_.clear();
  device_.poll(done_);
  for (const TranscodeDone& done : done_) {
    const auto found = jobs_.find(done.id);
    KVQ_ASSERT(found != jobs_.end());
    const Job job = found->second;
    jobs_.erase(found);
    if (job.checks) {
      finish_check(job, done);
    } else {
      finish_job(job, done, report);
    }
    commit();
    kill_point(KillPoint::transcode_committed);
  }
}

void StoreState::finish_job(const Job& job, const TranscodeDone& done, TickReport& report) {
  const Error& error = done.error;
  Tenant& t = tenant_of(job.tenant);
  const PageRecord& r = t.pages->record(job.page);
  KVQ_ASSERT(r.state == PageState::transcoding && r.slab == job.from.slab && r.slot == job.from.slot);
  pool_.set_leaving(job.from, false);
  t.leaving_bytes -= layouts_->layout(r.model, r.format).page_bytes;
  t.pages->set_turns_cold(job.page, false);
  const bool released = t.pages->use(job.page).references == 0 && (r.flags & kPageIndexed) == 0;
  // A holder that lost its connection since may not have mapped the new slab.
  const bool stays = released || t.pages->use(job.page).immobile > 0 || error.code != Errc::ok;
  if (stays) {
    pool_.give_back(job.to, now_ms_);
    t.pages->move(job.page, released ? PageState::retired : PageState::sealed);
  }
  if (released) {
    pool_.retire(job.from);
    t.limbo.retire({.slot = job.from, .page = job.page, .tag = t.directory.epoch(), .retired_ms = now_ms_});
    t.retired_in_epoch = true;
    return;
  }
  if (error.code != Errc::ok) {
    ++report.transcodes_failed;
    ++counts_.transcode_failures;
    if (error.code == Errc::lost_page) return quarantine(t, job.page);
    if (error.code == Errc::invalid_argument && !job.moves) {
      t.pages->set_keeps_dense(job.page);
    } else if (error.code != Errc::context_lost) {
      t.pages->count_failure(job.page, true);
    }
    if ((r.flags & kPageHasChecksum) == 0) t.unchecked.emplace_back(job.page, r.generation);
    log("event=transcode_failed tenant=" + t.spec.name + " page=" + std::to_string(raw(job.page)) + " why=\"" +
        error.context + "\"");
    return;
  }
  if (stays) return;
  ++counts_.transcodes[static_cast<std::size_t>(r.format)][static_cast<std::size_t>(job.format)];
  counts_.transcode_bytes += layouts_->layout(r.model, job.format).page_bytes;
  counts_.transcode.add(now_ms_ - job.started_ms);
  if (done.noise && job.measured) counts_.noise.at(*job.measured).add(*done.noise);
  t.pages->set_place(job.page, {job.to.slab, job.to.slot, job.format});
  t.pages->set_checksum(job.page, done.checksum);
  publish(t, job.page, {r.generation, job.format, EntryState::sealed, pool_.offset_bytes(job.to)});
  kill_point(KillPoint::transcode_published);
  pool_.retire(job.from);
  retire_unpublished(t, job.from);
  t.pages->count_failure(job.page, false);
  t.pages->move(job.page, PageState::sealed);
  ++report.transcodes_done;
}

}  // namespace kvq

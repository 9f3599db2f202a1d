// Slabs: created for a tenant and layout, usable once its sessions have mapped them, destroyed once nobody maps them.
//
// Invariant: an entry never names a slab that a ready, connected session of the tenant has not acknowledged, and a
// slab's memory goes back only after each importer has dropped it or ended. The charge lives exactly as long as the
// slab.
#include <algorithm>

#include "daemon/store_state.h"

namespace kvq {

namespace {

constexpr std::uint64_t kCreateRetryMs = 200;  // after the device found no memory

}  // namespace

// Making room takes room: a transcode may go beyond the quota by as much as the reserve holds.
bool StoreState::can_create_slab(const Tenant& t, bool for_transcode, Obstacle* obstacle) const {
  const TenantLedger::Account& account = ledger_.account(t.id);
  const std::uint64_t overdraft = for_transcode ? pool_.reserve() * pool_.slab_bytes() : 0;
  const bool failed = create_failed_ms_ && now_ms_ - *create_failed_ms_ < kCreateRetryMs;
  if (!pool_.may_open(for_transcode) || failed) {
    *obstacle = Obstacle::arena;
    return false;
  }
  if (account.quota_bytes != 0 && account.charged_bytes + pool_.slab_bytes() > account.quota_bytes + overdraft) {
    *obstacle = Obstacle::quota;
    return false;
  }
  return true;
}

bool StoreState::create_slab(Tenant& t, std::uint16_t model, Format format, bool for_transcode, Obstacle* obstacle) {
  if (!can_create_slab(t, for_transcode, obstacle)) return false;
  Result<TenantLedger::Charge> charge =
      ledger_.charge(t.id, pool_.slab_bytes(), for_transcode ? pool_.reserve() * pool_.slab_bytes() : 0);
  KVQ_ASSERT(charge);
  const std::optional<SlabId> slab =
      pool_.open(t.id, Layouts::id(model, format), layouts_->layout(model, format).page_bytes, for_transcode);
  KVQ_ASSERT(slab);
  if (const Result<void> created = device_.create_slab(*slab); !created) {
    pool_.close(*slab);
    create_failed_ms_ = now_ms_;
    *obstacle = Obstacle::arena;
    log(std::string("event=slab_create_failed tenant=") + t.spec.name + " why=\"" + created.error().context +
        "\" errno=" + std::to_string(created.error().native));
    return false;
  }
  kill_point(KillPoint::slab_made);
  keep(kept_name("slab", raw(*slab)), device_.descriptor(*slab, true));
  kill_point(KillPoint::slab_kept);
  SlabRecord& record = slab_record(*slab);
  record = {t.id, Layouts::id(model, format), 0, 0, device_.slab_serial(*slab)};
  std::atomic_signal_fence(std::memory_order_seq_cst);
  record.live = 1;
  kill_point(KillPoint::slab_recorded);
  SlabUse& use = slab_use_[raw(*slab)];
  use.charge = std::move(*charge);
  for (SessionId id : t.sessions) {
    Session& s = *find_session(id);
    if (!s.request.maps_slabs || !s.connected) continue;
    use.importers.push_back(id);
    if (s.ready) {
      use.awaited.push_back(id);
    } else {
      s.unmapped.push_back(*slab);
    }
    queue_notice(id, *slab, true);
  }
  ++counts_.slabs_created;
  *obstacle = Obstacle::waiting;
  log("event=slab_create slab=" + std::to_string(raw(*slab)) + " tenant=" + t.spec.name +
      " format=" + std::to_string(static_cast<int>(format)) + " free=" + std::to_string(pool_.free_slabs()));
  make_ready_if_answered(*slab);
  return true;
}

void StoreState::make_ready_if_answered(SlabId slab) {
  if (pool_.slab(slab).state == SlabState::creating && slab_use_[raw(slab)].awaited.empty()) {
    slab_record(slab).ready = 1;  // before any page can be in it
    pool_.set_ready(slab, now_ms_);
  }
}

void StoreState::return_slab(SlabId slab) {
  slab_record(slab).ready = 0;  // some will unmap it before others: a next daemon asks all to map it again
  pool_.start_drain(slab);
  SlabUse& use = slab_use_[raw(slab)];
  use.awaited = use.importers;
  for (SessionId id : use.importers) queue_notice(id, slab, false);
  finish_drain_if_answered(slab);
}

void StoreState::finish_drain_if_answered(SlabId slab) {
  SlabUse& use = slab_use_[raw(slab)];
  if (pool_.slab(slab).state != SlabState::draining || !use.awaited.empty()) return;
  const TenantId tenant = pool_.slab(slab).tenant;
  pool_.close(slab);
  if (device_.slabs() != pool_.ceiling()) device_.resize(pool_.ceiling() * pool_.slab_bytes());
  slab_record(slab).live = 0;
  kill_point(KillPoint::slab_forgotten);
  forget(kept_name("slab", raw(slab)));
  device_.destroy_slab(slab);
  use = SlabUse{};
  ++counts_.slabs_destroyed;
  log("event=slab_destroy slab=" + std::to_string(raw(slab)) + " tenant=" + tenant_of(tenant).spec.name);
}

Result<ResizeReport> StoreState::resize(std::uint64_t arena_bytes, bool dry_run) {
  const std::uint64_t slab = pool_.slab_bytes();
  if (!device_.can_resize()) return Error{Errc::limit_reached, 0, "this device's memory is one allocation"};
  if (arena_bytes % slab != 0) return Error{Errc::invalid_argument, 0, "an arena is whole slabs"};
  if (arena_bytes / slab <= pool_.reserve()) {
    return Error{Errc::invalid_argument, 0, "no slab would be left beside the reserve"};
  }
  if (arena_bytes > device_.most_bytes()) return Error{Errc::limit_reached, 0, "the arena's addresses end before"};
  const auto slabs = static_cast<std::uint32_t>(arena_bytes / slab);
  const std::uint32_t used = pool_.used_slabs();
  const ResizeReport report{pool_.limit() * slab, used, used - std::min(used, slabs)};
  if (dry_run) return report;
  pool_.set_limit(slabs);
  tables_.root_record().size_bytes = arena_bytes;
  device_.resize(pool_.ceiling() * slab);
  create_failed_ms_.reset();
  measure_pressure();
  return report;
}

void StoreState::forget_importer(SessionId id) {
  for (std::uint32_t i = 0; i < pool_.size(); ++i) {
    SlabUse& use = slab_use_[i];
    std::erase(use.importers, id);
    if (std::erase(use.awaited, id) == 0) continue;
    make_ready_if_answered(SlabId{i});
    finish_drain_if_answered(SlabId{i});
  }
}

void StoreState::queue_notice(SessionId id, SlabId slab, bool map) {
  const Session& s = *find_session(id);
  if (!s.connected || s.waits) return;  // one that waits gets them all when its client is back
  notices_.push_back({.session = id, .slab = slab, .map = map});
}

// The receiver may call acknowledge() at once, which can queue nothing but may destroy slabs and make others ready.
void StoreState::deliver_notices() {
  if (delivering_) return;
  delivering_ = true;
  while (!notices_.empty()) {
    SlabNotice notice = notices_.front();
    notices_.pop_front();
    const SlabState state = pool_.slab(notice.slab).state;
    if (notice.map) {
      KVQ_ASSERT(state != SlabState::free);  // it is awaited, so it cannot have been destroyed
      notice.writable = Layouts::format_of(pool_.slab(notice.slab).layout) == Format::dense;
      notice.descriptor = device_.descriptor(notice.slab, notice.writable);
      notice.serial = device_.slab_serial(notice.slab);
    }
    if (deliver_) deliver_(notice);
  }
  delivering_ = false;
}

}  // namespace kvq

// The store's parts, built in dependency order, and what operators configure.
#include "daemon/store.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "daemon/store_state.h"

namespace kvq {
namespace {

// Start-up only: no memory here means that kvqd cannot run.
template <typename T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(std::string("cannot make the store's memory: ") + result.error().context);
  return std::move(*result);
}

}  // namespace

std::unique_ptr<Store> Store::create(const StoreConfig& config, Device& device, DeliverNotice deliver, LogDecision log,
                                     Keeper* keeper, std::string adopt_refused) {
  auto state = std::make_unique<StoreState>(config, device, std::move(deliver), std::move(log), keeper,
                                            must(create_tables(config, device, keeper)));
  state->note_refused(std::move(adopt_refused));
  return state;
}

StoreState::StoreState(const StoreConfig& config, Device& device, DeliverNotice deliver, LogDecision log,
                       Keeper* keeper, StoreTables tables)
    : config_(config),
      device_(device),
      deliver_(std::move(deliver)),
      log_(std::move(log)),
      keeper_(keeper),
      tables_(std::move(tables)),
      journal_(tables_.journal.records()),
      layouts_(std::make_unique<Layouts>(tables_.models.records())),
      sequences_(std::make_unique<SequenceTable>(tables_.sequences.records(), tables_.chunks.records(),
                                                 region(TableKind::sequences, tables_.sequences.bytes()),
                                                 region(TableKind::chunks, tables_.chunks.bytes()))),
      pool_(device.slabs(), device.slab_bytes(), config.reserve_slabs, device.places()),
      slab_use_(device.places()) {
  if (!valid(config.watermarks)) throw std::invalid_argument("watermarks are not in order");
  if (pool_.usable_slabs() == 0) throw std::invalid_argument("reserve_slabs leaves no slab for pages");
  if (config.max_pages < 2) throw std::invalid_argument("max_pages must be at least 2");
}

TenantId StoreState::add_tenant(const TenantSpec& spec) {
  KVQ_ASSERT(spec.share > 0 && !spec.name.empty() && spec.name.size() < sizeof(TenantRecord::name));
  if (const std::optional<TenantId> known = find_tenant(spec.name)) {
    Tenant& t = tenant_of(*known);
    KVQ_ASSERT(adopt_.adopted && !t.configured);
    const auto salt = spec.random_salt ? t.spec.salt : spec.salt;
    t.spec = spec;
    t.spec.salt = salt;
    t.pages->set_quantizable(!spec.floor_dense);
    ledger_.set_quota(*known, spec.quota_bytes);
    write_tenant(t);
    return *known;
  }
  if (tenants_.size() >= kMaxTenants) throw std::runtime_error("more than 1024 tenants");
  const TenantId id{static_cast<std::uint32_t>(tenants_.size() + 1)};
  auto t = std::make_unique<Tenant>();
  t->id = id;
  t->spec = spec;
  add_files(*t, must(create_tenant_files(config_, device_, id, keeper_)), {});
  t->pages = std::make_unique<PageTable>(t->page_file.records(), !spec.floor_dense,
                                         region(TableKind::pages, t->page_file.bytes(), id));
  t->prefix = std::make_unique<PrefixIndex>(t->prefix_file.buckets(), *t->pages);
  ledger_.open_account(spec.quota_bytes);
  write_tenant(*t);
  tenants_.push_back(std::move(t));
  return id;
}

void StoreState::add_files(Tenant& t, TenantFiles files, Descriptor mirror) {
  t.page_file = std::move(files.pages);
  t.directory = std::move(files.directory);
  t.prefix_file = std::move(files.prefix);
  t.mirror_kept = mirror.get() >= 0;
  device_.add_mirror(t.id, t.directory.first_entry(), t.directory.capacity(), std::move(mirror));
}

// A name is written once; the numbers beside it may be of either daemon after a crash, and the configuration's win.
void StoreState::write_tenant(Tenant& t) {
  TenantRecord& r = tables_.tenants.records()[raw(t.id) - 1];
  if (r.live == 0) t.spec.name.copy(r.name, sizeof(r.name) - 1);
  std::copy(t.spec.salt.begin(), t.spec.salt.end(), r.salt);
  r.quota_bytes = t.spec.quota_bytes;
  r.share = t.spec.share;
  r.floor_dense = t.spec.floor_dense ? 1 : 0;
  std::atomic_signal_fence(std::memory_order_seq_cst);
  r.live = 1;
  t.configured = true;
}

std::optional<TenantId> StoreState::find_tenant(const std::string& name) const {
  for (const auto& t : tenants_) {
    if (t->spec.name == name) return t->id;
  }
  return std::nullopt;
}

const TenantSpec& StoreState::tenant(TenantId id) const { return tenant_of(id).spec; }

Result<void> StoreState::set_watermarks(const Watermarks& watermarks) {
  if (!valid(watermarks)) {
    return Error{Errc::invalid_argument, 0, "need 0 < relief < quantize_at <= evict_at <= refuse_at <= 1"};
  }
  config_.watermarks = watermarks;
  return {};
}

Result<void> StoreState::set_quota(TenantId id, std::uint64_t quota_bytes) {
  if (raw(id) == 0 || raw(id) > tenants_.size()) return Error{Errc::stale_id, 0, "no such tenant"};
  if (quota_bytes != 0 && quota_bytes < device_.slab_bytes()) {
    return Error{Errc::invalid_argument, 0, "a quota below one slab holds no page"};
  }
  tenant_of(id).spec.quota_bytes = quota_bytes;
  ledger_.set_quota(id, quota_bytes);
  return {};
}

Result<void> StoreState::set_share(TenantId id, double share) {
  if (raw(id) == 0 || raw(id) > tenants_.size()) return Error{Errc::stale_id, 0, "no such tenant"};
  if (!(share > 0) || share > 1e6) return Error{Errc::invalid_argument, 0, "a share is a number above 0"};
  tenant_of(id).spec.share = share;
  return {};
}

void StoreState::start_draining() {
  draining_ = true;
  for (auto& [id, s] : sessions_) {
    s->segment.words().draining.store(1, std::memory_order_relaxed);
    s->changed = true;
  }
  log("event=drain sessions=" + std::to_string(sessions_.size()));
}

StoreState::Session* StoreState::find_session(SessionId id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

const StoreState::Session* StoreState::find_session(SessionId id) const {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

std::vector<SessionId> StoreState::take_notices() {
  std::vector<SessionId> out;
  for (auto& [id, s] : sessions_) {
    if (std::exchange(s->changed, false)) out.push_back(id);
  }
  return out;
}

}  // namespace kvq

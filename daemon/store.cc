// The store's parts, built in dependency order, and what operators configure.
#include "daemon/store.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "daemon/store_state.h"

namespace kvq {
namespace {

constexpr std::uint32_t kMaxModels = 128;  // different geometries in use at one time

// Start-up only: no memory here means that kvqd cannot run.
template <typename T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(std::string("cannot make the store's memory: ") + result.error().context);
  return std::move(*result);
}

std::uint64_t chunks_for(const StoreConfig& config) {
  // Each sequence may waste most of one chunk; forks let the tables name each page several times.
  return config.max_sequences + 8 * (config.max_pages / kChunkPages + 1);
}

}  // namespace

std::unique_ptr<Store> Store::create(const StoreConfig& config, Device& device, DeliverNotice deliver,
                                     LogDecision log) {
  return std::make_unique<StoreState>(config, device, std::move(deliver), std::move(log));
}

StoreState::StoreState(const StoreConfig& config, Device& device, DeliverNotice deliver, LogDecision log)
    : config_(config),
      device_(device),
      deliver_(std::move(deliver)),
      log_(std::move(log)),
      model_file_(must(TableFile<ModelRecord>::create("kvq-models", TableKind::models, TenantId{}, kMaxModels))),
      sequence_file_(must(TableFile<SequenceRecord>::create("kvq-sequences", TableKind::sequences, TenantId{},
                                                            config.max_sequences + std::uint64_t{1}))),
      chunk_file_(must(TableFile<TableChunk>::create("kvq-chunks", TableKind::chunks, TenantId{}, chunks_for(config)))),
      layouts_(std::make_unique<Layouts>(model_file_.records())),
      sequences_(std::make_unique<SequenceTable>(sequence_file_.records(), chunk_file_.records())),
      pool_(device.slabs(), device.slab_bytes(), config.reserve_slabs),
      slab_use_(device.slabs()) {
  if (!valid(config.watermarks)) throw std::invalid_argument("watermarks are not in order");
  if (pool_.usable_slabs() == 0) throw std::invalid_argument("reserve_slabs leaves no slab for pages");
  if (config.max_pages < 2) throw std::invalid_argument("max_pages must be at least 2");
}

TenantId StoreState::add_tenant(const TenantSpec& spec) {
  KVQ_ASSERT(!find_tenant(spec.name) && spec.share > 0);
  const TenantId id{static_cast<std::uint32_t>(tenants_.size() + 1)};
  auto t = std::make_unique<Tenant>();
  t->id = id;
  t->spec = spec;
  const std::uint64_t buckets = std::bit_ceil(std::uint64_t{config_.max_pages} * 2);
  t->directory = must(DirectoryWriter::create({.tenant = id,
                                               .capacity = config_.max_pages,
                                               .arena_bytes = device_.arena_bytes(),
                                               .slab_bytes = device_.slab_bytes(),
                                               .prefix_buckets = buckets}));
  t->page_file = must(TableFile<PageRecord>::create("kvq-pages", TableKind::pages, id, config_.max_pages));
  t->prefix_file = must(PrefixFile::create(id, buckets));
  t->pages = std::make_unique<PageTable>(t->page_file.records(), !spec.floor_dense);
  t->prefix = std::make_unique<PrefixIndex>(t->prefix_file.buckets(), *t->pages);
  ledger_.open_account(spec.quota_bytes);
  tenants_.push_back(std::move(t));
  return id;
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

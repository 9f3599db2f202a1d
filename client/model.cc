// Invariant: whatever the daemon wrote into shared memory was checked when it was mapped; words that change are clamped
// here.
#include "client/model.h"

#include <algorithm>
#include <cstring>

#include "client/last_error.h"

namespace kvq::client {
namespace {

constexpr std::uint32_t kDefaultCredits = 8;
constexpr std::uint32_t kDefaultDeadlineMs = 5000;
constexpr std::uint32_t kFlushMs = 5000;  // for commands that need room in a full ring

kvq_status check_layer(const kvq_layer& layer, std::uint32_t index) {
  if (!head_dim_supported(layer.head_dim)) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "layer %u: head_dim %u is not supported; use 64, 80, 96, 128, 192 or 256", index,
                layer.head_dim);
  }
  if (layer.kv_heads == 0) return fail(KVQ_ERR_WRONG_LAYOUT, "layer %u: kv_heads is 0", index);
  if (layer.dtype != KVQ_FP16 && layer.dtype != KVQ_BF16) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "layer %u: dtype %u is neither fp16 (0) nor bf16 (1)", index, layer.dtype);
  }
  if (layer.query_heads == 0 || layer.query_heads % layer.kv_heads != 0 ||
      layer.query_heads / layer.kv_heads > kMaxGroup) {
    return fail(KVQ_ERR_WRONG_LAYOUT,
                "layer %u: query_heads %u is not a multiple of kv_heads %u between 1 and %u times as many", index,
                layer.query_heads, layer.kv_heads, kMaxGroup);
  }
  return KVQ_OK;
}

kvq_status read_description(const kvq_model_desc& desc, ModelGeometry& geometry) {
  if (desc.page_tokens != kPageTokens) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "page_tokens %u is not supported; use %u", desc.page_tokens, kPageTokens);
  }
  if (desc.layers == nullptr || desc.layer_count == 0 || desc.layer_count > kMaxLayers) {
    return fail(KVQ_ERR_WRONG_LAYOUT, "layer_count %u is outside 1 .. %u, or layers is NULL", desc.layer_count,
                kMaxLayers);
  }
  if (desc.role < KVQ_ROLE_BOTH || desc.role > KVQ_ROLE_DATA) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "role %d is none of both (0), control (1), data (2)",
                static_cast<int>(desc.role));
  }
  if (desc.credits > kMagazineSlots) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "credits %u is more than %u", desc.credits, kMagazineSlots);
  }
  geometry.layers = desc.layer_count;
  for (std::uint32_t i = 0; i < desc.layer_count; ++i) {
    if (auto s = check_layer(desc.layers[i], i); s != KVQ_OK) return s;
    const kvq_layer& layer = desc.layers[i];
    geometry.layer[i] = {layer.kv_heads, layer.head_dim, static_cast<Dtype>(layer.dtype),
                         static_cast<std::uint8_t>(layer.keep_dense != 0)};
  }
  return KVQ_OK;
}

}  // namespace

std::uint32_t Deadline::left_ms() const {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until_ - std::chrono::steady_clock::now()).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 0, UINT32_MAX));
}

kvq_status Model::open(Connection& connection, const kvq_model_desc& desc, std::shared_ptr<Model>& out) {
  RegisterRequest request;
  if (auto s = read_description(desc, request.geometry); s != KVQ_OK) return s;
  std::memcpy(request.fingerprint, desc.fingerprint, sizeof(request.fingerprint));
  request.role = desc.role;
  request.format_floor_dense = desc.format_floor_dense != 0;
  request.credits = desc.credits != 0 ? desc.credits : kDefaultCredits;
  request.deadline_ms = desc.deadline_ms != 0 ? desc.deadline_ms : kDefaultDeadlineMs;
  request.device = desc.device != nullptr ? desc.device : "";
  Grant grant;
  std::unique_ptr<Connection::Session> session;
  if (auto s = connection.register_model(request, grant, session); s != KVQ_OK) return s;
  std::unique_ptr<ModelSide> side = make_control_side();
  if (desc.role != KVQ_ROLE_CONTROL) {
    auto& segment = *reinterpret_cast<Segment*>(grant.segment->data());
    if (auto s = grant.memory->make_model_side(segment, side); s != KVQ_OK) return s;
  }
  std::shared_ptr<Model> made(new Model(desc, request.geometry, std::move(grant), std::move(session), std::move(side)));
  if (made->on_gpu()) {
    if (auto s = made->workspace_bytes(made->workspace_bytes_); s != KVQ_OK) return s;
  }
  out = std::move(made);
  return KVQ_OK;
}

Model::Model(const kvq_model_desc& desc, const ModelGeometry& geometry, Grant grant,
             std::unique_ptr<Connection::Session> session, std::unique_ptr<ModelSide> side)
    : geometry_(geometry),
      role_(desc.role),
      floor_dense_(desc.format_floor_dense != 0),
      grant_(std::move(grant)),
      session_(std::move(session)),
      side_(std::move(side)),
      steps_(segment(), memory().directory(), *side_),
      rings_(segment(), grant_.doorbell.get()) {
  for (std::uint32_t f = 1; f < kFormatCount; ++f) layouts_[f] = make_layout(geometry_, static_cast<Format>(f));
  for (std::uint32_t i = 0; i < desc.layer_count; ++i) query_heads_.push_back(desc.layers[i].query_heads);
  const std::span<const std::uint8_t, 32> fingerprint(desc.fingerprint);
  root_ = thread_hasher().root(std::span<const std::uint8_t, 32>(grant_.salt), fingerprint, geometry_);
  digest_ = thread_hasher().model_digest(fingerprint, geometry_);
  if (on_gpu()) grant_.memory->watch(grant_.session, segment());
}

Model::~Model() { grant_.memory->unwatch(grant_.session); }

kvq_status Model::close() {
  if (steps_.open() != 0) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "%u steps are open; end them before the model is closed", steps_.open());
  }
  if (steps_.running() != 0 && side_->ask_context() != KVQ_OK) steps_.end_lost();
  if (const std::uint32_t running = steps_.running(); running != 0) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "%u steps still run on the GPU; synchronize the stream first", running);
  }
  const Lock held = lock();
  closed_.store(true, std::memory_order_release);
  session_->end();
  return KVQ_OK;
}

kvq_status Model::check_open() const {
  if (!closed_.load(std::memory_order_acquire)) return KVQ_OK;
  return fail(KVQ_ERR_STALE_ID, "the model of this handle was closed; release the handle");
}

kvq_status Model::check_session() const {
  if (auto s = check_open(); s != KVQ_OK) return s;
  const SessionState& state = session_->state();
  return state.is_lost() ? fail(KVQ_ERR_DAEMON_GONE, "%s", state.lost_text().c_str()) : KVQ_OK;
}

kvq_status Model::check_admission() const {
  if (auto s = check_session(); s != KVQ_OK) return s;
  if (segment().daemon.draining.load(std::memory_order_relaxed) == 0) return KVQ_OK;
  return fail(KVQ_ERR_DRAINING, "kvqd is draining and admits nothing new; finish what is open and use another node");
}

kvq_status Model::check_data(const char* call) const {
  if (auto s = check_open(); s != KVQ_OK) return s;
  if (!control()) return KVQ_OK;
  return fail(KVQ_ERR_INVALID_ARGUMENT, "%s needs mapped pages; a control session has none: use a data session", call);
}

kvq_status Model::prepare(Lock& lock, std::uint32_t commands, std::uint32_t credits, const Deadline& deadline) {
  while (!unreleased_.empty() && rings_.has_room(commands + 1)) {
    push_release(unreleased_.back());
    unreleased_.pop_back();
  }
  if (rings_.has_room(commands) && rings_.has_credits(credits)) return KVQ_OK;  // the hot path reads no clock
  const Deadline flush(kFlushMs);
  for (;;) {
    if (!rings_.has_room(commands)) {
      if (flush.left_ms() == 0)
        return fail(KVQ_ERR_LIMIT_REACHED, "kvqd does not empty this session's command ring; look at its log");
      lock.unlock();
      const kvq_status flushed = session_->ping(credits != 0 ? deadline.left_ms() : flush.left_ms());
      lock.lock();
      if (flushed != KVQ_OK) return flushed;
      continue;
    }
    if (rings_.has_credits(credits)) return KVQ_OK;
    const std::uint32_t left_ms = deadline.left_ms();
    lock.unlock();
    const kvq_status granted = session_->credits(credits, left_ms);
    lock.lock();
    if (granted != KVQ_OK) return granted;
    if (!rings_.has_credits(credits) && left_ms == 0) {  // another thread of this session was faster
      return fail(KVQ_ERR_NO_MEMORY, "%u pages were wanted, %u are at hand; raise the deadline or the credits", credits,
                  rings_.credits());
    }
  }
}

void Model::push_release(SequenceId id) {
  rings_.push({.kind = CommandKind::release, .sequence = id});
  free_ids_.push_back(raw(id));
}

void Model::release(SequenceId id) {
  if (check_session() != KVQ_OK) return;  // the daemon has released all by itself
  Lock held = lock();
  const bool waits = !session_->state().away.load(std::memory_order_acquire);
  if (!rings_.has_room(1) && (!waits || prepare(held, 1, 0, Deadline(0)) != KVQ_OK)) {
    unreleased_.push_back(id);
    return;
  }
  push_release(id);
  rings_.wake_daemon_if_needed();
}

void Model::abandon(SequenceId id) {
  if (check_session() != KVQ_OK) return;
  const Lock held = lock();
  if (rings_.has_room(1)) rings_.push({.kind = CommandKind::release, .sequence = id});
}

kvq_status Model::take_sequence_id(const Lock&, SequenceId& id) {
  if (!free_ids_.empty()) {
    id = SequenceId{free_ids_.back()};
    free_ids_.pop_back();
    return KVQ_OK;
  }
  if (next_id_ >= kMaxSequences)
    return fail(KVQ_ERR_LIMIT_REACHED, "%u sequences are open, the most a session may have", next_id_ - 1);
  id = SequenceId{next_id_++};
  return KVQ_OK;
}

kvq_status Model::request_credits(std::uint32_t pages, std::uint32_t deadline_ms) {
  if (auto s = check_admission(); s != KVQ_OK) return s;
  if (pages > kMagazineSlots)
    return fail(KVQ_ERR_LIMIT_REACHED, "%u credits are more than a session can hold (%u)", pages, kMagazineSlots);
  Lock held = lock();
  return prepare(held, 0, pages, Deadline(deadline_ms));
}

kvq_status Model::return_credits(std::uint32_t pages) {
  if (auto s = check_session(); s != KVQ_OK) return s;
  Lock held = lock();
  for (std::uint32_t i = std::min(pages, rings_.credits()); i > 0; --i) {
    if (auto s = prepare(held, 1, 0, Deadline(0)); s != KVQ_OK) return s;
    if (!rings_.has_credits(1)) break;
    const MagazineItem item = rings_.pop_credit();
    rings_.push({.kind = CommandKind::return_credit, .page = item.page, .generation = item.generation});
  }
  rings_.ring_doorbell();  // somebody may be waiting for these pages
  return KVQ_OK;
}

kvq_status Model::get_pressure(kvq_pressure& out) {
  if (auto s = check_session(); s != KVQ_OK) return s;
  const DaemonWords& words = segment().daemon;
  out.level = static_cast<kvq_pressure_level>(
      std::min<std::uint32_t>(words.pressure_level.load(std::memory_order_relaxed), KVQ_REFUSE));
  out.credits_wanted_back = words.credits_wanted_back.load(std::memory_order_relaxed);
  out.lost_pages = words.lost_pages.load(std::memory_order_relaxed);
  out.draining = words.draining.load(std::memory_order_relaxed) != 0;
  out.reconnecting = session_->state().away.load(std::memory_order_acquire);
  out.reconnects = session_->state().reconnects.load(std::memory_order_relaxed);
  const Lock held = lock();
  out.credits = rings_.credits();
  return KVQ_OK;
}

kvq_status Model::lost_pages(std::uint64_t since, LostPages& out) {
  if (auto s = check_session(); s != KVQ_OK) return s;
  out.now = segment().daemon.lost_pages.load(std::memory_order_relaxed);
  return out.now == since ? KVQ_OK : session_->lost_pages(since, out);
}

void Model::get_info(kvq_model_info& out) const {
  const TenantMemory::Shape& shape = memory().shape();
  out.session = raw(grant_.session);
  out.tenant = raw(shape.tenant);
  out.tenant_name = grant_.tenant_name.c_str();
  out.arena_bytes = shape.arena_bytes;
  out.slab_bytes = shape.slab_bytes;
  out.dense_page_bytes = layouts_[static_cast<std::size_t>(Format::dense)].page_bytes;
  out.cold_page_bytes = layouts_[static_cast<std::size_t>(grant_.cold_format) % kFormatCount].page_bytes;
  out.cold_format = static_cast<kvq_format>(grant_.cold_format);
  out.device = grant_.device.c_str();
  out.device_uuid = shape.device_uuid.c_str();
}

}  // namespace kvq::client

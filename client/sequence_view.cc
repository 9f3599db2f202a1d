// What others see of a sequence: information, block table, slots, and the flat bytes that carry it to another process.
//
// Invariant: exported bytes hold no pointer and nothing secret; they name the daemon instance, tenant, model and each
// page's generation, so that importing them anywhere else, or too late, is an error.
//
//   SequenceImage (96 bytes) | ImagePage[page_count] (8 bytes each)
#include <cstring>

#include "client/last_error.h"
#include "client/sequence.h"

namespace kvq::client {
namespace {

constexpr std::uint64_t kImageMagic = 0x0100'5145'5351'564b;  // "KVQSEQ\0\1" in memory
constexpr std::uint32_t kImageVersion = 1;

struct SequenceImage {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t page_count;
  std::uint64_t bytes;
  std::uint64_t daemon_instance;
  std::uint32_t tenant;
  std::uint32_t session;
  std::uint32_t sequence;
  std::uint32_t first_kept;
  std::uint64_t committed_tokens;
  Key model;  // PrefixHasher::model_digest
  std::uint64_t reserved;
};
static_assert(sizeof(SequenceImage) == 96);

struct ImagePage {
  std::uint32_t page;
  std::uint16_t generation;
  std::uint16_t reserved;
};
static_assert(sizeof(ImagePage) == 8);

kvq_status check_image(const Model& model, const SequenceImage& image, std::size_t bytes) {
  if (image.magic != kImageMagic)
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_sequence_import: these are not the bytes of a sequence");
  if (image.version != kImageVersion) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "kvq_sequence_import: version %u, this libkvq reads %u; use one release",
                image.version, kImageVersion);
  }
  if (image.bytes != bytes || bytes != sizeof(SequenceImage) + std::uint64_t{image.page_count} * sizeof(ImagePage) ||
      image.committed_tokens > std::uint64_t{image.page_count} * kPageTokens || image.first_kept > image.page_count) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_sequence_import: %zu bytes, %llu were exported; pass all of them", bytes,
                static_cast<unsigned long long>(image.bytes));
  }
  const TenantMemory::Shape& shape = model.memory().shape();
  if (image.daemon_instance != shape.daemon_instance || image.tenant != raw(shape.tenant)) {
    return fail(KVQ_ERR_STALE_ID, "kvq_sequence_import: the sequence belongs to another kvqd or tenant");
  }
  if (image.model != model.digest()) {
    return fail(KVQ_ERR_WRONG_LAYOUT,
                "kvq_sequence_import: the sequence belongs to another model (layers or fingerprint differ)");
  }
  return KVQ_OK;
}

bool readable(const Entry& entry) { return entry.state == EntryState::open || entry.state == EntryState::sealed; }

}  // namespace

kvq_status Sequence::get_info(kvq_sequence_info& out) const {
  if (auto s = model_->check_open(); s != KVQ_OK) return s;
  out.id = raw(id_);
  out.committed_tokens = committed_;
  out.reserved_tokens = places_.size() * kPageTokens;
  out.pages = places_.size();
  out.dense_pages = out.quantized_pages = out.lost_pages = 0;
  out.parked = parked_;
  for (const Place& place : places_) {
    if (place.page == kNullPage) continue;
    const Entry entry = model_->entry(place.page);
    const bool there = entry.generation == place.generation && (readable(entry) || entry.state == EntryState::host);
    (!there ? out.lost_pages : entry.format == Format::dense ? out.dense_pages : out.quantized_pages) += 1;
  }
  return KVQ_OK;
}

kvq_status Sequence::block_table(std::int32_t* out, std::size_t capacity, std::size_t* count) const {
  if (auto s = model_->check_open(); s != KVQ_OK) return s;
  if (count != nullptr) *count = places_.size();
  if (capacity < places_.size()) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_block_table: %zu pages do not fit into %zu entries", places_.size(),
                capacity);
  }
  for (std::size_t i = 0; i < places_.size(); ++i) out[i] = static_cast<std::int32_t>(raw(places_[i].page));
  return KVQ_OK;
}

kvq_status Sequence::slot_mapping(std::uint64_t first, std::uint64_t count, std::int64_t* out) const {
  if (auto s = model_->check_open(); s != KVQ_OK) return s;
  const std::uint64_t room = places_.size() * kPageTokens;
  if (first > room || count > room - first) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_slot_mapping of tokens [%llu, %llu), %llu are reserved; reserve first",
                static_cast<unsigned long long>(first), static_cast<unsigned long long>(first + count),
                static_cast<unsigned long long>(room));
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t token = first + i;
    out[i] = std::int64_t{raw(places_[token / kPageTokens].page)} * kPageTokens +
             static_cast<std::int64_t>(token % kPageTokens);
  }
  return KVQ_OK;
}

kvq_status Sequence::export_bytes(void* out, std::size_t capacity, std::size_t* bytes) const {
  if (auto s = model_->check_open(); s != KVQ_OK) return s;
  if (view_)
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_sequence_export: the sequence is a view; export it where it was opened");
  const std::size_t need = sizeof(SequenceImage) + places_.size() * sizeof(ImagePage);
  if (bytes != nullptr) *bytes = need;
  if (out == nullptr) return KVQ_OK;
  if (capacity < need)
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_sequence_export: %zu bytes do not fit into %zu", need, capacity);
  const TenantMemory::Shape& shape = model_->memory().shape();
  SequenceImage image{};
  image.magic = kImageMagic;
  image.version = kImageVersion;
  image.page_count = static_cast<std::uint32_t>(places_.size());
  image.bytes = need;
  image.daemon_instance = shape.daemon_instance;
  image.tenant = raw(shape.tenant);
  image.session = raw(model_->session_id());
  image.sequence = raw(id_);
  image.first_kept = static_cast<std::uint32_t>(first_kept_);
  image.committed_tokens = committed_;
  image.model = model_->digest();
  auto* at = static_cast<std::byte*>(out);
  std::memcpy(at, &image, sizeof(image));
  at += sizeof(image);
  for (const Place& place : places_) {
    const ImagePage page{raw(place.page), place.generation, 0};
    std::memcpy(at, &page, sizeof(page));
    at += sizeof(page);
  }
  return KVQ_OK;
}

kvq_status Sequence::import(std::shared_ptr<Model> model, const void* data, std::size_t bytes,
                            std::unique_ptr<Sequence>& out) {
  if (auto s = model->check_open(); s != KVQ_OK) return s;
  SequenceImage image;
  if (data == nullptr || bytes < sizeof(image)) {
    return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_sequence_import: %zu bytes are fewer than a sequence's header (%zu)",
                bytes, sizeof(image));
  }
  std::memcpy(&image, data, sizeof(image));
  if (auto s = check_image(*model, image, bytes); s != KVQ_OK) return s;
  std::unique_ptr<Sequence> made(new Sequence(model));
  made->view_ = true;
  made->id_ = SequenceId{image.sequence};
  made->committed_ = image.committed_tokens;
  made->first_kept_ = image.first_kept;
  const auto* at = static_cast<const std::byte*>(data) + sizeof(image);
  for (std::uint32_t i = 0; i < image.page_count; ++i, at += sizeof(ImagePage)) {
    ImagePage page;
    std::memcpy(&page, at, sizeof(page));
    if (page.page >= model->memory().directory().capacity) {
      return fail(KVQ_ERR_INVALID_ARGUMENT, "kvq_sequence_import: page %u is outside the directory", page.page);
    }
    const Entry entry = model->entry(PageId{page.page});
    if (page.page != 0 && (entry.generation != page.generation || !readable(entry))) {
      return fail(KVQ_ERR_STALE_ID, "kvq_sequence_import: page %u of the sequence has ended meanwhile; export it again",
                  page.page);
    }
    made->places_.push_back({PageId{page.page}, page.generation});
  }
  out = std::move(made);
  return KVQ_OK;
}

}  // namespace kvq::client

// Makes and opens the files. What differs between this daemon's shape and the state's is named with both values.
#include "daemon/store_tables.h"

#include <fcntl.h>
#include <sys/random.h>

#include <bit>
#include <cerrno>
#include <cstring>

namespace kvq {
namespace {

constexpr std::uint32_t kMaxModels = 128;  // different geometries in use at one time

#ifndef KVQ_VERSION
#error "KVQ_VERSION comes from the project's version"
#endif

std::uint64_t chunks_for(const StoreConfig& config) {
  // Each sequence may waste most of one chunk; forks let the tables name each page several times.
  return config.max_sequences + 8 * (config.max_pages / kChunkPages + 1);
}

std::uint64_t buckets_for(const StoreConfig& config) { return std::bit_ceil(std::uint64_t{config.max_pages} * 2); }

// Makes one table and keeps it; the first failure stays.
class Maker {
 public:
  explicit Maker(Keeper* keeper) : keeper_(keeper) {}
  template <typename Record>
  void make(TableFile<Record>& out, const char* what, TableKind kind, std::uint64_t count) {
    if (error.code != Errc::ok) return;
    Result<TableFile<Record>> made = TableFile<Record>::create(kept_name(what).c_str(), kind, TenantId{}, count);
    error = made.error();
    if (!made) return;
    out = std::move(*made);
    if (keeper_ != nullptr) keeper_->keep(kept_name(what), out.descriptor());
  }
  Error error;

 private:
  Keeper* keeper_;
};

// Opens one table that was left; the first failure stays.
class Taker {
 public:
  Taker(Kept& kept, std::string& why) : kept_(kept), why_(why) {}
  template <typename Record>
  void take(TableFile<Record>& out, const char* what, TableKind kind, std::uint64_t count) {
    const std::string name = kept_name(what);
    if (error.code != Errc::ok) return;
    Result<TableFile<Record>> found = TableFile<Record>::adopt(kept_[name], kind, TenantId{}, count);
    if (found) {
      out = std::move(*found);
    } else {
      error = found.error();
      why_ = name + ": " + error.context;
    }
  }
  Error error;

 private:
  Kept& kept_;
  std::string& why_;
};

std::string differs(const char* what, std::uint64_t state, std::uint64_t here) {
  return std::string(what) + " was " + std::to_string(state) + ", now it is " + std::to_string(here);
}

std::string other_shape(const RootRecord& r, const StoreConfig& config, const Device& device) {
  if (r.live == 0) return "it was never finished";
  if (r.slab_bytes != device.slab_bytes()) return differs("slab_bytes", r.slab_bytes, device.slab_bytes());
  if (r.arena_bytes != device.most_bytes()) {
    return differs("the arena's range of addresses", r.arena_bytes, device.most_bytes());
  }
  if (r.max_pages != config.max_pages) return differs("max_pages", r.max_pages, config.max_pages);
  if (r.max_sequences != config.max_sequences) return differs("max_sequences", r.max_sequences, config.max_sequences);
  if (r.chunks != chunks_for(config)) return differs("chunks", r.chunks, chunks_for(config));
  if (r.page_tokens != kPageTokens) return differs("page_tokens", r.page_tokens, kPageTokens);
  if (std::strncmp(r.device, device.name().c_str(), sizeof(r.device)) != 0) return "the device is another";
  if (r.instance == 0) return "it has no instance number";
  if (r.size_bytes % r.slab_bytes != 0 || r.size_bytes > r.arena_bytes) return "no arena has the size that it names";
  if (device.places() <= config.reserve_slabs) return "its arena has no slab beside the reserve";
  return "";
}

}  // namespace

std::string kept_name(const char* what) { return std::string("kvq-") + what; }
std::string kept_name(const char* what, std::uint32_t id) { return kept_name(what) + "-" + std::to_string(id); }

std::optional<KeptArena> kept_arena(const Kept& kept) {
  const auto root = kept.find(kept_name("root"));
  if (root == kept.end()) return std::nullopt;
  Descriptor copy(::fcntl(root->second.get(), F_DUPFD_CLOEXEC, 0));
  const auto file = TableFile<RootRecord>::adopt(copy, TableKind::root, TenantId{}, 1);
  if (!file) return std::nullopt;
  const RootRecord& r = file->records()[0];
  return KeptArena{r.arena_bytes, r.slab_bytes, std::string(r.device, ::strnlen(r.device, sizeof(r.device))),
                   session_range_of(SessionId{r.last_session})};
}

DirectorySpec directory_spec(const StoreConfig& config, const Device& device, TenantId tenant) {
  return {.tenant = tenant,
          .capacity = config.max_pages,
          .arena_bytes = device.most_bytes(),
          .slab_bytes = device.slab_bytes(),
          .prefix_buckets = buckets_for(config)};
}

Result<StoreTables> create_tables(const StoreConfig& config, const Device& device, Keeper* keeper) {
  StoreTables t;
  Maker maker(keeper);
  maker.make(t.root, "root", TableKind::root, 1);
  maker.make(t.tenants, "tenants", TableKind::tenants, kMaxTenants);
  maker.make(t.sessions, "sessions", TableKind::sessions, kMaxSessionRecords);
  maker.make(t.slabs, "slabs", TableKind::slabs, device.places());
  maker.make(t.models, "models", TableKind::models, kMaxModels);
  maker.make(t.sequences, "sequences", TableKind::sequences, config.max_sequences + std::uint64_t{1});
  maker.make(t.chunks, "chunks", TableKind::chunks, chunks_for(config));
  maker.make(t.journal, "journal", TableKind::journal, kJournalWords);
  if (maker.error.code != Errc::ok) return maker.error;
  RootRecord& r = t.root_record();
  while (r.instance == 0) {
    if (::getrandom(&r.instance, sizeof(r.instance), 0) != static_cast<ssize_t>(sizeof(r.instance))) {
      return Error{Errc::system, errno, "random bytes for the arena's instance number"};
    }
  }
  r.arena_bytes = device.most_bytes();
  r.size_bytes = device.arena_bytes();
  r.asked_bytes = device.asked_bytes();
  r.slab_bytes = device.slab_bytes();
  r.chunks = chunks_for(config);
  r.max_pages = config.max_pages;
  r.max_sequences = config.max_sequences;
  r.page_tokens = kPageTokens;
  r.last_session = config.session_range * kSessionsOfRange;
  std::strncpy(r.device, device.name().c_str(), sizeof(r.device) - 1);
  std::strncpy(r.writer, KVQ_VERSION, sizeof(r.writer) - 1);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  r.live = 1;
  return t;
}

Result<TenantFiles> create_tenant_files(const StoreConfig& config, const Device& device, TenantId tenant,
                                        Keeper* keeper) {
  auto pages = TableFile<PageRecord>::create("kvq-pages", TableKind::pages, tenant, config.max_pages);
  if (!pages) return pages.error();
  auto directory = DirectoryWriter::create(directory_spec(config, device, tenant));
  if (!directory) return directory.error();
  auto prefix = PrefixFile::create(tenant, buckets_for(config));
  if (!prefix) return prefix.error();
  if (keeper != nullptr) {
    keeper->keep(kept_name("pages", raw(tenant)), pages->descriptor());
    keeper->keep(kept_name("directory", raw(tenant)), directory->descriptor());
    keeper->keep(kept_name("prefix", raw(tenant)), prefix->descriptor());
  }
  return TenantFiles{std::move(*pages), std::move(*directory), std::move(*prefix)};
}

Result<StoreTables> adopt_tables(const StoreConfig& config, const Device& device, Kept& kept, std::string& why) {
  StoreTables t;
  Taker taker(kept, why);
  taker.take(t.root, "root", TableKind::root, 1);
  if (taker.error.code != Errc::ok) return taker.error;
  why = other_shape(t.root_record(), config, device);
  if (!why.empty()) return Error{Errc::invalid_argument, 0, "the state describes another arena"};
  taker.take(t.tenants, "tenants", TableKind::tenants, kMaxTenants);
  taker.take(t.sessions, "sessions", TableKind::sessions, kMaxSessionRecords);
  taker.take(t.slabs, "slabs", TableKind::slabs, device.places());
  taker.take(t.models, "models", TableKind::models, kMaxModels);
  taker.take(t.sequences, "sequences", TableKind::sequences, config.max_sequences + std::uint64_t{1});
  taker.take(t.chunks, "chunks", TableKind::chunks, chunks_for(config));
  taker.take(t.journal, "journal", TableKind::journal, kJournalWords);
  if (taker.error.code != Errc::ok) return taker.error;
  return t;
}

std::string size_arena(RootRecord& r, const StoreConfig& config, Device& device) {
  const std::uint64_t size = r.size_bytes == 0 ? r.arena_bytes : r.size_bytes;
  const std::uint64_t asked = r.asked_bytes == 0 ? r.arena_bytes : r.asked_bytes;
  const std::uint64_t least = (config.reserve_slabs + std::uint64_t{1}) * r.slab_bytes;
  const std::uint64_t wanted = std::max(asked == device.asked_bytes() ? size : device.asked_bytes(), least);
  r.size_bytes = std::min(wanted, r.arena_bytes);
  r.asked_bytes = device.asked_bytes();
  device.resize(r.size_bytes);
  if (r.size_bytes == size && wanted == size) return "";
  return "event=arena_resized arena_bytes=" + std::to_string(r.size_bytes) +
         " arena_bytes_before=" + std::to_string(size) + " why=\"the configuration asks for " + std::to_string(wanted) +
         (wanted > r.arena_bytes ? ", and no more addresses are reserved: drain and start again for that\"" : "\"");
}

Result<TenantFiles> adopt_tenant_files(const StoreConfig& config, const Device& device, TenantId tenant, Kept& kept,
                                       std::string& why) {
  std::string name = kept_name("pages", raw(tenant));
  auto pages = TableFile<PageRecord>::adopt(kept[name], TableKind::pages, tenant, config.max_pages);
  if (!pages) {
    why = name + ": " + pages.error().context;
    return pages.error();
  }
  name = kept_name("directory", raw(tenant));
  auto directory = DirectoryWriter::adopt(kept[name], directory_spec(config, device, tenant));
  if (!directory) {
    why = name + ": " + directory.error().context;
    return directory.error();
  }
  name = kept_name("prefix", raw(tenant));
  auto prefix = PrefixFile::adopt(kept[name], tenant, buckets_for(config));
  if (!prefix) {
    why = name + ": " + prefix.error().context;
    return prefix.error();
  }
  return TenantFiles{std::move(*pages), std::move(*directory), std::move(*prefix)};
}

}  // namespace kvq

// Invariant: sizes come from a checked header, and are compared with the file's length before the whole is mapped.
#include "client/mapped_file.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cerrno>
#include <cstring>

#include "client/last_error.h"

namespace kvq::client {
namespace {

namespace ip = boost::interprocess;

struct Descriptor {  // what mapped_region wants of a mappable object
  int fd;
  ip::mapping_handle_t get_mapping_handle() const { return {fd, false}; }
};

kvq_status check_version(const char* what, std::uint64_t magic, std::uint64_t expected_magic, std::uint32_t version) {
  if (magic != expected_magic) {
    return fail(KVQ_ERR_VERSION_MISMATCH, "%s: magic %#llx, expected %#llx; install kvqd and libkvq of one release",
                what, static_cast<unsigned long long>(magic), static_cast<unsigned long long>(expected_magic));
  }
  if (version != kContractVersion) {
    return fail(KVQ_ERR_VERSION_MISMATCH,
                "%s: contract version %u, libkvq speaks %u; install kvqd and libkvq of one release", what, version,
                kContractVersion);
  }
  return KVQ_OK;
}

kvq_status wrong_value(const char* what, const char* field, std::uint64_t value, std::uint64_t expected) {
  return fail(KVQ_ERR_VERSION_MISMATCH, "%s: %s is %llu, expected %llu; install kvqd and libkvq of one release", what,
              field, static_cast<unsigned long long>(value), static_cast<unsigned long long>(expected));
}

}  // namespace

kvq_status MappedFile::map(int fd, std::uint64_t bytes, bool writable, const char* what,
                           std::unique_ptr<MappedFile>& out) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return fail(KVQ_ERR_SYSTEM, "%s: fstat: %s", what, std::strerror(errno));
  if (static_cast<std::uint64_t>(info.st_size) < bytes) {
    return fail(KVQ_ERR_VERSION_MISMATCH,
                "%s: %lld bytes long, expected at least %llu; install kvqd and libkvq of one release", what,
                static_cast<long long>(info.st_size), static_cast<unsigned long long>(bytes));
  }
  try {
    ip::mapped_region region(Descriptor{fd}, writable ? ip::read_write : ip::read_only, 0,
                             static_cast<std::size_t>(bytes));
    ::madvise(region.get_address(), region.get_size(), MADV_DONTFORK);
    out.reset(new MappedFile(std::move(region)));
    return KVQ_OK;
  } catch (const ip::interprocess_exception& error) {
    return fail(KVQ_ERR_SYSTEM, "%s: mapping %llu bytes: %s; check the process's address space limit", what,
                static_cast<unsigned long long>(bytes), error.what());
  }
}

kvq_status map_directory(int fd, TenantId tenant, std::uint64_t arena_bytes, std::uint64_t slab_bytes,
                         std::unique_ptr<MappedFile>& out) {
  constexpr const char* kWhat = "directory";
  std::unique_ptr<MappedFile> head;
  if (auto s = MappedFile::map(fd, sizeof(DirectoryHeader), false, kWhat, head); s != KVQ_OK) return s;
  const auto& header = *reinterpret_cast<const DirectoryHeader*>(head->data());
  if (auto s = check_version(kWhat, header.magic, kDirectoryMagic, header.version); s != KVQ_OK) return s;
  if (header.tenant != tenant) return wrong_value(kWhat, "tenant", raw(header.tenant), raw(tenant));
  if (header.arena_bytes != arena_bytes) return wrong_value(kWhat, "arena_bytes", header.arena_bytes, arena_bytes);
  if (header.slab_bytes != slab_bytes) return wrong_value(kWhat, "slab_bytes", header.slab_bytes, slab_bytes);
  return MappedFile::map(fd, directory_bytes(header.capacity), false, kWhat, out);
}

kvq_status map_prefix_table(int fd, TenantId tenant, std::uint64_t buckets, std::unique_ptr<MappedFile>& out) {
  constexpr const char* kWhat = "prefix table";
  std::unique_ptr<MappedFile> head;
  if (auto s = MappedFile::map(fd, sizeof(PrefixHeader), false, kWhat, head); s != KVQ_OK) return s;
  const auto& header = *reinterpret_cast<const PrefixHeader*>(head->data());
  if (auto s = check_version(kWhat, header.magic, kPrefixMagic, header.version); s != KVQ_OK) return s;
  if (header.tenant != tenant) return wrong_value(kWhat, "tenant", raw(header.tenant), raw(tenant));
  if (header.buckets != buckets || !std::has_single_bit(header.buckets)) {
    return wrong_value(kWhat, "buckets", header.buckets, buckets);
  }
  return MappedFile::map(fd, prefix_table_bytes(header.buckets), false, kWhat, out);
}

kvq_status map_segment(int fd, TenantId tenant, SessionId session, std::unique_ptr<MappedFile>& out) {
  constexpr const char* kWhat = "session segment";
  std::unique_ptr<MappedFile> mapped;
  if (auto s = MappedFile::map(fd, kSegmentBytes, true, kWhat, mapped); s != KVQ_OK) return s;
  const auto& header = *reinterpret_cast<const SegmentHeader*>(mapped->data());
  if (auto s = check_version(kWhat, header.magic, kSegmentMagic, header.version); s != KVQ_OK) return s;
  if (header.tenant != tenant) return wrong_value(kWhat, "tenant", raw(header.tenant), raw(tenant));
  if (header.session != session) return wrong_value(kWhat, "session", raw(header.session), raw(session));
  if (header.bytes != kSegmentBytes) return wrong_value(kWhat, "bytes", header.bytes, kSegmentBytes);
  out = std::move(mapped);
  return KVQ_OK;
}

}  // namespace kvq::client

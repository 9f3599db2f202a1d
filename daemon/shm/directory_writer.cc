// Lays a directory out; the magic goes in last.
#include "daemon/shm/directory_writer.h"

#include <utility>

namespace kvq {

Result<DirectoryWriter> DirectoryWriter::create(const DirectorySpec& spec) {
  KVQ_ASSERT(spec.capacity > 1);
  Result<Memfd> memory = Memfd::create("kvq-directory", directory_bytes(spec.capacity));
  if (!memory) return memory.error();
  DirectoryWriter writer;
  writer.memory_ = std::move(*memory);
  DirectoryHeader& h = writer.header();
  h.version = kContractVersion;
  h.capacity = spec.capacity;
  h.tenant = spec.tenant;
  h.arena_bytes = spec.arena_bytes;
  h.slab_bytes = spec.slab_bytes;
  h.prefix_buckets = spec.prefix_buckets;
  h.epoch.store(1, std::memory_order_relaxed);
  writer.publish(kNullPage, Entry{0, Format::none, EntryState::null, 0});
  std::atomic_thread_fence(std::memory_order_release);
  h.magic = kDirectoryMagic;
  return writer;
}

Result<DirectoryWriter> DirectoryWriter::adopt(Descriptor& file, const DirectorySpec& spec) {
  Result<Memfd> memory = Memfd::adopt(file, directory_bytes(spec.capacity));
  if (!memory) return memory.error();
  DirectoryWriter writer;
  writer.memory_ = std::move(*memory);
  const DirectoryHeader& h = writer.header();
  if (h.magic != kDirectoryMagic || h.version != kContractVersion) {
    return Error{Errc::version_mismatch, 0, "the directory's magic number or version is another"};
  }
  if (h.capacity != spec.capacity || h.tenant != spec.tenant || h.arena_bytes != spec.arena_bytes ||
      h.slab_bytes != spec.slab_bytes || h.prefix_buckets != spec.prefix_buckets || raw(writer.epoch()) == 0) {
    return Error{Errc::invalid_argument, 0, "the directory's header describes another arena"};
  }
  return writer;
}

}  // namespace kvq

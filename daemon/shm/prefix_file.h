// The memory file of a prefix table (kvq/prefix_table.h): laid out here, written through core/prefix_index.h.
//
// Invariant: the number of buckets is a power of two that never changes.
#pragma once

#include <span>

#include "daemon/shm/memfd.h"
#include "kvq/prefix_table.h"

namespace kvq {

class PrefixFile {
 public:
  static Result<PrefixFile> create(TenantId tenant, std::uint64_t buckets) {
    Result<Memfd> memory = Memfd::create("kvq-prefix", prefix_table_bytes(buckets));
    if (!memory) return memory.error();
    PrefixFile file;
    file.memory_ = std::move(*memory);
    PrefixHeader& h = *reinterpret_cast<PrefixHeader*>(file.memory_.data());
    h.version = kContractVersion;
    h.tenant = tenant;
    h.buckets = buckets;
    h.magic = kPrefixMagic;
    return file;
  }

  static Result<PrefixFile> adopt(Descriptor& fd, TenantId tenant, std::uint64_t buckets) {
    Result<Memfd> memory = Memfd::adopt(fd, prefix_table_bytes(buckets));
    if (!memory) return memory.error();
    const PrefixHeader& h = *reinterpret_cast<const PrefixHeader*>(memory->data());
    if (h.magic != kPrefixMagic || h.version != kContractVersion || h.tenant != tenant || h.buckets != buckets) {
      return Error{Errc::version_mismatch, 0, "the header describes another prefix table"};
    }
    PrefixFile file;
    file.memory_ = std::move(*memory);
    return file;
  }

  const PrefixHeader& header() const { return *reinterpret_cast<const PrefixHeader*>(memory_.data()); }
  std::span<Bucket> buckets() const {
    return {reinterpret_cast<Bucket*>(memory_.data() + sizeof(PrefixHeader)),
            static_cast<std::size_t>(header().buckets)};
  }
  int descriptor() const { return memory_.descriptor(); }
  int read_only_descriptor() const { return memory_.read_only_descriptor(); }

 private:
  Memfd memory_;
};

}  // namespace kvq

// A daemon-private table in a memory file: a header, then records of one type. What the next daemon adopts.
//
// Invariant: the header says what the records are; a file whose magic, version, record size or count differs is refused
// whole, never read in part.
//
//   TableHeader (64 bytes) | Record[count]
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>
#include <utility>

#include "daemon/shm/memfd.h"
#include "kvq/types.h"

namespace kvq {

inline constexpr std::uint64_t kTableMagic = 0x0100'4c42'5451'564b;  // "KVQTBL\0\1" in memory

enum class TableKind : std::uint32_t {  // never renumber
  pages = 1,
  sequences = 2,
  chunks = 3,
  models = 4,
  root = 5,
  tenants = 6,
  sessions = 7,
  slabs = 8,
  journal = 9,
};

inline constexpr std::uint32_t kStateVersion = 2;  // of all records behind these headers

struct alignas(64) TableHeader {
  std::uint64_t magic;
  std::uint32_t version;  // kStateVersion
  TableKind kind;
  TenantId tenant;  // 0: of the whole daemon
  std::uint32_t record_bytes;
  std::uint64_t count;
  std::uint8_t reserved[64 - 32];
};
static_assert(sizeof(TableHeader) == 64);

template <typename Record>
class TableFile {
  static_assert(std::is_trivially_copyable_v<Record> && alignof(Record) <= 64);

 public:
  static Result<TableFile> create(const char* name, TableKind kind, TenantId tenant, std::uint64_t count) {
    Result<Memfd> memory = Memfd::create(name, sizeof(TableHeader) + count * sizeof(Record));
    if (!memory) return memory.error();
    TableFile file;
    file.memory_ = std::move(*memory);
    auto* header = reinterpret_cast<TableHeader*>(file.memory_.data());
    header->version = kStateVersion;
    header->kind = kind;
    header->tenant = tenant;
    header->record_bytes = sizeof(Record);
    header->count = count;
    header->magic = kTableMagic;
    return file;
  }

  // What an earlier daemon made. `file` is used up.
  static Result<TableFile> adopt(Descriptor& file, TableKind kind, TenantId tenant, std::uint64_t count) {
    Result<Memfd> memory = Memfd::adopt(file, sizeof(TableHeader) + count * sizeof(Record));
    if (!memory) return memory.error();
    const auto& header = *reinterpret_cast<const TableHeader*>(memory->data());
    if (header.magic != kTableMagic) return Error{Errc::version_mismatch, 0, "the magic number is another"};
    if (header.version != kStateVersion) return Error{Errc::version_mismatch, 0, "written in another state version"};
    if (header.kind != kind || header.tenant != tenant || header.record_bytes != sizeof(Record) ||
        header.count != count) {
      return Error{Errc::version_mismatch, 0, "the header describes another table"};
    }
    TableFile out;
    out.memory_ = std::move(*memory);
    return out;
  }

  std::span<Record> records() const {
    return {reinterpret_cast<Record*>(memory_.data() + sizeof(TableHeader)),
            static_cast<std::size_t>(reinterpret_cast<const TableHeader*>(memory_.data())->count)};
  }
  int descriptor() const { return memory_.descriptor(); }
  std::span<std::byte> bytes() const { return std::as_writable_bytes(records()); }

 private:
  Memfd memory_;
};

}  // namespace kvq

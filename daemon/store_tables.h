// The memory files that hold everything a next daemon needs, made fresh or taken over.
//
// Invariant: every file is kept (Keeper) before a record that counts on it is written, and the root's `live` is written
// when all files of the whole arena exist. So what adopt() finds is complete, or it says what is missing.
#pragma once

#include <string>

#include "daemon/core/journal.h"
#include "daemon/core/layouts.h"
#include "daemon/core/sequence_table.h"
#include "daemon/shm/directory_writer.h"
#include "daemon/shm/prefix_file.h"
#include "daemon/shm/table_file.h"
#include "daemon/store_records.h"

namespace kvq {

// Names under which descriptors are kept.
std::string kept_name(const char* what);                    // "kvq-WHAT"
std::string kept_name(const char* what, std::uint32_t id);  // "kvq-WHAT-ID"

constexpr std::uint32_t journal_region(TableKind kind, TenantId tenant = {}) {
  return (static_cast<std::uint32_t>(kind) << 24) | raw(tenant);
}

struct TenantFiles {
  TableFile<PageRecord> pages;
  DirectoryWriter directory;
  PrefixFile prefix;
};

struct StoreTables {
  TableFile<RootRecord> root;
  TableFile<TenantRecord> tenants;
  TableFile<SessionRecord> sessions;
  TableFile<SlabRecord> slabs;
  TableFile<ModelRecord> models;
  TableFile<SequenceRecord> sequences;
  TableFile<TableChunk> chunks;
  TableFile<std::uint64_t> journal;

  RootRecord& root_record() const { return root.records()[0]; }
};

DirectorySpec directory_spec(const StoreConfig& config, const Device& device, TenantId tenant);

// `keeper` may be null: then nothing outlives this process.
Result<StoreTables> create_tables(const StoreConfig& config, const Device& device, Keeper* keeper);
Result<TenantFiles> create_tenant_files(const StoreConfig& config, const Device& device, TenantId tenant,
                                        Keeper* keeper);

// Headers and sizes are checked, records are not. On failure `why` names the file and what is wrong with it.
Result<StoreTables> adopt_tables(const StoreConfig& config, const Device& device, Kept& kept, std::string& why);
// The size of an arena that is taken over: as it was, unless the configuration asks for another than it did then. What
// is beyond the arena's range has to wait for a clean start. Returns what the log is to say of another size.
std::string size_arena(RootRecord& root, const StoreConfig& config, Device& device);
Result<TenantFiles> adopt_tenant_files(const StoreConfig& config, const Device& device, TenantId tenant, Kept& kept,
                                       std::string& why);

}  // namespace kvq

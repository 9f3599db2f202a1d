// Whether the records of an earlier daemon may be taken over.
//
// Invariant: after check_records() has said nothing, every index, id and enumerator in the records is in range, every
// slot has one page, and every block table is whole, so that the store's own assertions hold on them. It only reads.
#pragma once

#include <string>
#include <vector>

#include "daemon/store_tables.h"

namespace kvq {

// What is wrong, naming the record; empty: nothing. `tenants`: the files of live tenants, in order of their ids.
std::string check_records(const StoreTables& tables, const std::vector<TenantFiles>& tenants, std::uint64_t slab_bytes);

}  // namespace kvq

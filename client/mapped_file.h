// Mapped memory of the daemon: a memfd's pages in this process, checked before anything reads them.
//
// Invariant: a MappedFile exists only when its descriptor was at least `bytes` long; it does not keep the descriptor; a
// child of fork() does not inherit it (the daemon would not know that the child maps it).
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "kvq/directory.h"
#include "kvq/kvq.h"
#include "kvq/prefix_table.h"
#include "kvq/segment.h"
#include "kvq/types.h"

namespace kvq::client {

class MappedFile {
 public:
  // Maps the first `bytes` of `fd`; `what` names it in the error text. Errors: SYSTEM, VERSION_MISMATCH (file too
  // short).
  static kvq_status map(int fd, std::uint64_t bytes, bool writable, const char* what, std::unique_ptr<MappedFile>& out);

  std::byte* data() const { return static_cast<std::byte*>(region_.get_address()); }

 private:
  explicit MappedFile(boost::interprocess::mapped_region region) : region_(std::move(region)) {}
  boost::interprocess::mapped_region region_;
};

// Each maps the header, checks magic, version, owner and sizes, then maps all of it. VERSION_MISMATCH names what
// differs.
kvq_status map_directory(int fd, TenantId tenant, std::uint64_t arena_bytes, std::uint64_t slab_bytes,
                         std::unique_ptr<MappedFile>& out);
kvq_status map_prefix_table(int fd, TenantId tenant, std::uint64_t buckets, std::unique_ptr<MappedFile>& out);
kvq_status map_segment(int fd, TenantId tenant, SessionId session, std::unique_ptr<MappedFile>& out);

}  // namespace kvq::client

// A memory file: anonymous memory behind a descriptor, mapped here and passed to other processes.
//
// Invariant: its size is sealed and all its bytes are allocated from the start, so nobody can truncate it under a
// mapping, and a limit that it hits is an error of create(), not a signal at a later write. One owner; descriptors
// close on exec.
#pragma once

#include <boost/interprocess/mapped_region.hpp>
#include <cstddef>
#include <cstdint>

#include "daemon/shm/descriptor.h"
#include "kvq/result.h"

namespace kvq {

// A sealed memory file of `bytes` zeros, not mapped. `name` shows in /proc/PID/maps.
Result<Descriptor> make_memory_file(const char* name, std::uint64_t bytes);

// Whether `file` is a memory file of `bytes` bytes as make_memory_file makes them, owned by this process's user.
Result<void> check_memory_file(const Descriptor& file, std::uint64_t bytes);

// What tells it from every other memory file that is alive.
std::uint64_t file_number(const Descriptor& file);

// The same file, opened again for reading only: whoever gets this descriptor cannot map it writable.
Result<Descriptor> reopen_read_only(const Descriptor& file);

class Memfd {
 public:
  static Result<Memfd> create(const char* name, std::uint64_t bytes);
  // Maps what an earlier daemon made: a memory file of this user, sealed, of exactly `bytes` bytes. `file` is used up.
  static Result<Memfd> adopt(Descriptor& file, std::uint64_t bytes);

  Memfd() = default;
  Memfd(Memfd&&) noexcept = default;
  Memfd& operator=(Memfd&&) noexcept = default;

  std::byte* data() const { return static_cast<std::byte*>(region_.get_address()); }
  std::uint64_t bytes() const { return region_.get_size(); }
  int descriptor() const { return file_.get(); }  // read and write
  int read_only_descriptor() const { return read_only_.get(); }

 private:
  static Result<Memfd> map(Descriptor file, std::uint64_t bytes);
  Descriptor file_, read_only_;
  boost::interprocess::mapped_region region_;
};

}  // namespace kvq

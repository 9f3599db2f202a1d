// A memory file as an importer maps it.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

namespace kvq::testing {

class FileBytes {
 public:
  FileBytes(int fd, std::uint64_t bytes, bool writable)
      : bytes_(bytes),
        base_(::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0)) {}
  ~FileBytes() {
    if (ok()) ::munmap(base_, bytes_);
  }
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  bool ok() const { return base_ != MAP_FAILED; }
  void read(std::uint64_t offset, void* to, std::uint64_t count) const {
    std::memcpy(to, static_cast<const char*>(base_) + offset, count);
  }
  void write(std::uint64_t offset, const void* from, std::uint64_t count) const {
    std::memcpy(static_cast<char*>(base_) + offset, from, count);
  }

 private:
  std::uint64_t bytes_;
  void* base_;
};

}  // namespace kvq::testing

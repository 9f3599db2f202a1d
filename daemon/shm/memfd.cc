// The order matters: size, allocate, map, then seal; a seal cannot be taken back.
#include "daemon/shm/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

namespace kvq {
namespace {

// What boost::interprocess::mapped_region maps: anything with a descriptor and a mode.
struct Mappable {
  int fd;
  boost::interprocess::mapping_handle_t get_mapping_handle() const { return {fd, false}; }
  boost::interprocess::mode_t get_mode() const { return boost::interprocess::read_write; }
};

Error system_error(const char* context) { return {Errc::system, errno, context}; }

}  // namespace

Descriptor::Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Result<Descriptor> make_memory_file(const char* name, std::uint64_t bytes) {
  Descriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return system_error("memfd_create");
  if (::fchmod(file.get(), 0600) != 0) return system_error("fchmod of a memory file");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return system_error("size of a memory file");
  if (::fallocate(file.get(), 0, 0, static_cast<off_t>(bytes)) != 0) return system_error("memory for a memory file");
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return system_error("seals of a memory file");
  }
  return file;
}

Result<Descriptor> reopen_read_only(const Descriptor& file) {
  const std::string path = "/proc/self/fd/" + std::to_string(file.get());
  Descriptor reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (reader.get() < 0) return system_error("reopening a memory file for reading");
  return reader;
}

Result<Memfd> Memfd::create(const char* name, std::uint64_t bytes) {
  Memfd out;
  Result<Descriptor> file = make_memory_file(name, bytes);
  if (!file) return file.error();
  Result<Descriptor> reader = reopen_read_only(*file);
  if (!reader) return reader.error();
  try {
    out.region_ = boost::interprocess::mapped_region(Mappable{file->get()}, boost::interprocess::read_write, 0,
                                                     static_cast<std::size_t>(bytes));
  } catch (const boost::interprocess::interprocess_exception& e) {
    return Error{Errc::system, e.get_native_error(), "mapping a memory file"};
  }
  out.file_ = std::move(*file);
  out.read_only_ = std::move(*reader);
  return out;
}

}  // namespace kvq

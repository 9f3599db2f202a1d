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

constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;

Error system_error(const char* context) { return {Errc::system, errno, context}; }

}  // namespace

Result<Descriptor> make_memory_file(const char* name, std::uint64_t bytes) {
  Descriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return system_error("memfd_create");
  if (::fchmod(file.get(), 0600) != 0) return system_error("fchmod of a memory file");
  if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) return system_error("size of a memory file");
  if (::fallocate(file.get(), 0, 0, static_cast<off_t>(bytes)) != 0) return system_error("memory for a memory file");
  if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) {
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

std::uint64_t file_number(const Descriptor& file) {
  struct stat info {};
  KVQ_ASSERT(::fstat(file.get(), &info) == 0);
  return info.st_ino;
}

Result<void> check_memory_file(const Descriptor& file, std::uint64_t bytes) {
  struct stat info {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) return Error{Errc::invalid_argument, 0, "no such descriptor"};
  if (info.st_uid != ::geteuid()) return Error{Errc::permission_denied, 0, "a memory file of another user"};
  if (static_cast<std::uint64_t>(info.st_size) != bytes) {
    return Error{Errc::invalid_argument, 0, "a memory file of another size"};
  }
  const int seals = ::fcntl(file.get(), F_GET_SEALS);  // also refuses everything that is no memory file
  if (seals < 0 || (seals & kSeals) != kSeals) return Error{Errc::invalid_argument, 0, "not a sealed memory file"};
  if ((::fcntl(file.get(), F_GETFL) & O_ACCMODE) != O_RDWR) {
    return Error{Errc::invalid_argument, 0, "a memory file that cannot be written"};
  }
  return {};
}

Result<Memfd> Memfd::create(const char* name, std::uint64_t bytes) {
  Result<Descriptor> file = make_memory_file(name, bytes);
  if (!file) return file.error();
  return map(std::move(*file), bytes);
}

Result<Memfd> Memfd::adopt(Descriptor& file, std::uint64_t bytes) {
  if (const Result<void> good = check_memory_file(file, bytes); !good) return good.error();
  return map(std::move(file), bytes);
}

Result<Memfd> Memfd::map(Descriptor file, std::uint64_t bytes) {
  Memfd out;
  Result<Descriptor> reader = reopen_read_only(file);
  if (!reader) return reader.error();
  try {
    out.region_ = boost::interprocess::mapped_region(Mappable{file.get()}, boost::interprocess::read_write, 0,
                                                     static_cast<std::size_t>(bytes));
  } catch (const boost::interprocess::interprocess_exception& e) {
    return Error{Errc::system, e.get_native_error(), "mapping a memory file"};
  }
  out.file_ = std::move(file);
  out.read_only_ = std::move(*reader);
  return out;
}

}  // namespace kvq

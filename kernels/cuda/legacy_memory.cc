// cuMemAlloc and cuIpc*, and the file that a handle travels in. Destructors ignore errors, as in vmm.cc.
#include "kernels/cuda/legacy_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace kvq::cuda {
namespace {

constexpr std::uint64_t kMagic = 0x3163'7069'7176'6b00;  // "\0kvqipc1", as little-endian bytes
constexpr std::uint32_t kVersion = 1;
// Nobody who has the descriptor can make it name other memory.
constexpr int kSeals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_WRITE | F_SEAL_SEAL;

struct HandleFile {
  std::uint64_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint32_t handle_bytes = sizeof(CUipcMemHandle);
  LegacyPart part;
};
static_assert(sizeof(HandleFile) == 16 + 2 * sizeof(CUipcMemHandle) + 24);

Error file_error(const char* what) { return {Errc::system, errno, what}; }

}  // namespace

bool same_handle(const CUipcMemHandle& a, const CUipcMemHandle& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

bool is_legacy_file(int fd) { return ::fcntl(fd, F_GET_SEALS) >= 0; }

Result<LegacyPart> read_legacy_file(int fd) {
  struct stat info {};
  HandleFile file;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  const bool whole = seals >= 0 && (seals & kSeals) == kSeals && ::fstat(fd, &info) == 0 &&
                     info.st_size == sizeof file && ::pread(fd, &file, sizeof file, 0) == sizeof file;
  if (!whole || file.magic != kMagic) return Error{Errc::invalid_argument, 0, "not a file of a GPU memory handle"};
  if (file.version != kVersion || file.handle_bytes != sizeof(CUipcMemHandle)) {
    return Error{Errc::invalid_argument, 0, "a GPU memory handle of another release of kvq"};
  }
  const LegacyPart& part = file.part;
  if (part.bytes == 0 || part.offset > part.allocation_bytes || part.bytes > part.allocation_bytes - part.offset) {
    return Error{Errc::invalid_argument, 0, "a GPU memory handle of a part that is outside its allocation"};
  }
  return part;
}

Result<int> write_legacy_file(const LegacyPart& part) {
  HandleFile file;
  file.part = part;
  const int fd = ::memfd_create("kvq-handle", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return file_error("a memory file for a GPU memory handle");
  if (::fchmod(fd, 0600) == 0 && ::pwrite(fd, &file, sizeof file, 0) == sizeof file &&
      ::fcntl(fd, F_ADD_SEALS, kSeals) == 0) {
    return fd;
  }
  const Error error = file_error("writing a GPU memory handle");
  ::close(fd);
  return error;
}

Result<LegacyMemory> LegacyMemory::create(std::uint64_t bytes) {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  CUdeviceptr base = 0;
  if (const CUresult code = (*d)->mem_alloc(&base, bytes)) return driver_error(code, "cuMemAlloc");
  LegacyMemory out(base, bytes);  // from here on an error frees
  if (const CUresult code = (*d)->ipc_get_mem_handle(&out.handle_, base)) {
    return driver_error(code, "cuIpcGetMemHandle");
  }
  return out;
}

LegacyMemory::~LegacyMemory() {
  if (base_ != 0) (*driver())->mem_free(base_);
}

Result<int> LegacyMemory::export_zeroed(std::uint64_t offset, std::uint64_t bytes, const LegacyMemory& arena) const {
  KVQ_ASSERT(offset <= bytes_ && bytes <= bytes_ - offset);
  const Driver& d = **driver();
  // On the default stream, which waits for none of kvq's.
  CUresult code = d.memset_d8_async(base_ + offset, 0, bytes, nullptr);
  if (!code) code = d.stream_synchronize(nullptr);
  if (code) return driver_error(code, "zeroing memory before others see it");
  return write_legacy_file({handle_, arena.handle_, bytes_, offset, bytes});
}

Result<LegacyImport> LegacyImport::open(const CUipcMemHandle& handle) {
  const Result<const Driver*> d = driver();
  if (!d) return d.error();
  CUdeviceptr base = 0;
  // The driver knows no other flag; between processes on one GPU it has no effect.
  const CUresult code = (*d)->ipc_open_mem_handle(&base, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  // These say nothing of this context.
  if (code == CUDA_ERROR_UNKNOWN || code == CUDA_ERROR_INVALID_CONTEXT) {
    return Error{Errc::system, 0, "this GPU memory handle opens nothing: its maker has ended, or is this process"};
  }
  if (code) return driver_error(code, "cuIpcOpenMemHandle");
  return LegacyImport(base);
}

LegacyImport::~LegacyImport() {
  if (base_ != 0) (*driver())->ipc_close_mem_handle(base_);
}

}  // namespace kvq::cuda

// What the tests of the CUDA device share: imports of slabs, descriptors sent between processes, a backend per process.
//
// Invariant: a process makes one backend and keeps it; whatever needs another backend, or may break its context, is a
// role.
#pragma once

#include <string>
#include <vector>

#include "daemon/gpu/backend.h"
#include "kernels/cuda/legacy_memory.h"
#include "kernels/cuda/vmm.h"
#include "tests/support/role_process.h"

namespace kvq::test {

// The value, or the process ends with the error's text: a test of a GPU goes on nowhere without it.
[[noreturn]] void die(const Error& error, const char* file, int line);
#define KVQ_MUST(expression)                                           \
  ([&](auto result) {                                                  \
    if (!result) ::kvq::test::die(result.error(), __FILE__, __LINE__); \
    return result;                                                     \
  }(expression))

std::unique_ptr<gpu::Backend> open_backend(std::optional<gpu::Exporter> exporter = {});

// Memory of another process, or of this one, by its descriptor; a handle file is another's, and always writable.
struct Imported {
  cuda::AddressRange range;
  cuda::Mapping mapping;
  cuda::LegacyImport allocation;
  std::uint64_t offset = 0;  // in the allocation
  Imported(int fd, std::uint64_t bytes, cuda::Access access);
  std::uint64_t base() const { return allocation.base() != 0 ? allocation.base() + offset : mapping.base(); }
};

void upload(std::uint64_t to, const std::vector<std::byte>& bytes);
std::vector<std::byte> download(std::uint64_t from, std::uint64_t bytes);
std::uint64_t free_bytes();  // of the GPU

// A way for descriptors between the test and a role; the role gets the number of its end as an argument.
class Channel {
 public:
  Channel();                                 // the test's side
  explicit Channel(const std::string& end);  // the role's side
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;
  std::string far_end() const { return std::to_string(far_); }
  void send(int fd, std::uint64_t value = 0) const;
  Descriptor receive(std::uint64_t* value = nullptr) const;  // fails after 30 s

 private:
  int near_ = -1, far_ = -1;
};

double now_ms();
// One row of the results (topic "device").
void report(const std::string& name, const std::string& shape, double value, const std::string& unit);
void write_results();  // where KVQ_RESULTS says, if it does

}  // namespace kvq::test

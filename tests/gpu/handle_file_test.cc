// The file in which a legacy handle travels: it is read as it was written, and nothing else is. Needs no GPU.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "daemon/shm/descriptor.h"
#include "kernels/cuda/legacy_memory.h"

namespace kvq::test {
namespace {

class HandleFile : public ::testing::Test {
 protected:
  HandleFile() {
    std::memset(&part.handle, 0x5a, sizeof part.handle);
    std::memset(&part.arena, 0xa5, sizeof part.arena);
    part.allocation_bytes = 4 << 20;
    part.offset = part.bytes = 2 << 20;
  }
  static Descriptor written(const cuda::LegacyPart& part) {
    const Result<int> fd = cuda::write_legacy_file(part);
    EXPECT_TRUE(fd);
    return Descriptor(fd ? *fd : -1);
  }
  static Errc reading(int fd) { return cuda::read_legacy_file(fd).error().code; }
  cuda::LegacyPart part;
};

TEST_F(HandleFile, IsReadAsItWasWritten) {
  const Descriptor file = written(part);
  EXPECT_TRUE(cuda::is_legacy_file(file.get()));
  const Result<cuda::LegacyPart> read = cuda::read_legacy_file(file.get());
  ASSERT_TRUE(read);
  EXPECT_EQ(std::memcmp(&*read, &part, sizeof part), 0);
}

TEST_F(HandleFile, NobodyCanChangeIt) {
  const Descriptor file = written(part);
  EXPECT_EQ(::pwrite(file.get(), "x", 1, 0), -1);
  EXPECT_EQ(::ftruncate(file.get(), 0), -1);
  EXPECT_EQ(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0), MAP_FAILED);
}

TEST_F(HandleFile, NothingElseIsReadAsOne) {
  part.bytes += 1;
  EXPECT_EQ(reading(written(part).get()), Errc::invalid_argument) << "a part beyond its allocation";
  part.bytes = 0;
  EXPECT_EQ(reading(written(part).get()), Errc::invalid_argument);
  const Descriptor empty(::memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(reading(empty.get()), Errc::invalid_argument);
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor reader(ends[0]), writer(ends[1]);
  EXPECT_FALSE(cuda::is_legacy_file(reader.get()));
  EXPECT_EQ(reading(reader.get()), Errc::invalid_argument);
}

}  // namespace
}  // namespace kvq::test

// Helpers of the GPU tests. Device 0 of the visible ones is the one that is tested.
#include "tests/gpu/gpu_test.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <ctime>
#include <optional>

#include "tests/bench/rows.h"
#include "tests/gpu/one_backend.h"

namespace kvq::test {

void die(const Error& error, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: error %d (driver %d): %s: %s\n", file, line, static_cast<int>(error.code), error.native,
               error.context, cuda::driver_text(error.native));
  std::exit(77);
}

std::unique_ptr<gpu::Backend> open_backend(std::optional<gpu::Exporter> exporter) {
  std::string why_not;
  auto backend = gpu::open_cuda("", exporter, why_not);
  if (!backend) {
    std::fprintf(stderr, "no backend: %s\n", why_not.c_str());
    std::exit(77);
  }
  return std::move(*backend);
}

Imported::Imported(int fd, std::uint64_t bytes, cuda::Access access) {
  KVQ_ASSERT(cudaFree(nullptr) == cudaSuccess);  // the context
  if (cuda::is_legacy_file(fd)) {
    const auto part = KVQ_MUST(cuda::read_legacy_file(fd));
    KVQ_ASSERT(part->bytes == bytes);
    allocation = std::move(*KVQ_MUST(cuda::LegacyImport::open(part->handle)));
    offset = part->offset;
    return;
  }
  const auto memory = KVQ_MUST(cuda::Physical::import(fd));
  range = std::move(*KVQ_MUST(cuda::AddressRange::reserve(0, bytes)));
  mapping = std::move(*KVQ_MUST(range.map(0, bytes, *memory, access)));
}

void upload(std::uint64_t to, const std::vector<std::byte>& bytes) {
  ASSERT_EQ(cudaMemcpy(reinterpret_cast<void*>(to), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // a small copy may still be on its way, and the mapping may go next
}

std::vector<std::byte> download(std::uint64_t from, std::uint64_t bytes) {
  std::vector<std::byte> out(bytes);
  EXPECT_EQ(cudaMemcpy(out.data(), reinterpret_cast<const void*>(from), bytes, cudaMemcpyDeviceToHost), cudaSuccess);
  return out;
}

std::uint64_t free_bytes() {
  std::size_t free = 0, total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  return free;
}

Channel::Channel() {
  int ends[2];
  KVQ_ASSERT(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);  // not closed by exec: the role inherits its end
  near_ = ends[0];
  far_ = ends[1];
}

Channel::Channel(const std::string& end) : near_(std::stoi(end)) {}

Channel::~Channel() {
  ::close(near_);
  if (far_ >= 0) ::close(far_);
}

void Channel::send(int fd, std::uint64_t value) const {
  iovec data{&value, sizeof value};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
  KVQ_ASSERT(::sendmsg(near_, &message, MSG_NOSIGNAL) == sizeof value);
}

Descriptor Channel::receive(std::uint64_t* value) const {
  pollfd wanted{near_, POLLIN, 0};
  KVQ_ASSERT(::poll(&wanted, 1, 30'000) == 1);
  std::uint64_t number = 0;
  iovec data{&number, sizeof number};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = room;
  message.msg_controllen = sizeof room;
  KVQ_ASSERT(::recvmsg(near_, &message, MSG_CMSG_CLOEXEC) == sizeof number);
  if (value != nullptr) *value = number;
  const cmsghdr* c = CMSG_FIRSTHDR(&message);
  KVQ_ASSERT(c != nullptr);
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
  return Descriptor(fd);
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

// Made with the first row, when the driver has been asked for the GPUs anyway; no file without KVQ_RESULTS.
std::optional<bench::Rows> results;

bench::Rows make_results() {
  const auto set = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  const std::time_t today = std::time(nullptr);
  char date[16];
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&today));
  bench::Rows rows(
      {"device", KVQ_MUST(cuda::visible_gpus())->front().name, bench::driver_name((*KVQ_MUST(cuda::driver()))->version),
       date, set("KVQ_COMMIT"), "gpu_backend_test"},
      set("KVQ_RESULTS"));
  return rows;
}

}  // namespace

void report(const std::string& name, const std::string& shape, double value, const std::string& unit) {
  if (!results) results.emplace(make_results());
  nlohmann::json row = {{"value", value}, {"unit", unit}};
  if (unit == "us") row["median_us"] = value;
  results->document(name, shape, std::move(row));
}

void write_results() {
  if (results) results->write();
}

}  // namespace kvq::test

namespace {
// First of all: whoever asks the runtime first would make a context of another kind.
struct FirstContext : ::testing::Environment {
  void SetUp() override { kvq::test::backend(); }
};
}  // namespace

int main(int argc, char** argv) {
  ::testing::AddGlobalTestEnvironment(new FirstContext);
  const int code = kvq::test::main_with_roles(argc, argv);
  try {
    kvq::test::write_results();  // the rows that there are, also when a test has failed
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpu_backend_test: %s\n", error.what());
    return 1;
  }
  return code;
}

// kvqd-gpu: the worker process of one GPU. kvqd starts it; by hand it only lists the GPUs that kvqd could be given.
//
// Invariant: whatever keeps it from working is said once: to kvqd when its socket is there, else on stderr; then it
// exits with 3.
#include <sys/socket.h>

#include <cstdio>
#include <optional>
#include <string_view>

#include "daemon/gpu/backend.h"
#include "daemon/gpu/cuda_context.h"

namespace {

using namespace kvq;
using namespace kvq::gpu;

constexpr int kUsage = 2, kNoGpu = 3;

bool is_started_by_kvqd() {
  int type = 0;
  socklen_t size = sizeof type;
  return ::getsockopt(kSocketFd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

int fail(const std::string& why) {
  if (is_started_by_kvqd()) {
    refuse_worker(why);
  } else {
    std::fprintf(stderr, "kvqd-gpu: %s\n", why.c_str());
  }
  return kNoGpu;
}

int list() {
  const Result<std::vector<cuda::Gpu>> gpus = cuda::visible_gpus();
  if (!gpus) return fail(gpus.error().context);
  for (const cuda::Gpu& gpu : *gpus) {
    std::string why;
    // One that cannot be worked with is listed like the others: kvqd says so when it starts its worker.
    const Result<std::unique_ptr<CudaContext>> context = CudaContext::open(gpu.uuid, why);
    const Result<std::uint64_t> free = context ? (*context)->free_bytes() : Result<std::uint64_t>(context.error());
    if (!context) std::fprintf(stderr, "kvqd-gpu: %s\n", why.c_str());
    std::string name = gpu.name;  // one word, so that the line has four
    for (char& c : name) c = c == ' ' ? '_' : c;
    std::printf("%s %s %llu %llu\n", gpu.uuid.c_str(), name.c_str(), static_cast<unsigned long long>(gpu.total_bytes),
                static_cast<unsigned long long>(free ? *free : 0));
  }
  return 0;
}

int usage() {
  std::fprintf(
      stderr, "kvqd-gpu: use: kvqd-gpu --list, or kvqd-gpu --uuid UUID [--export auto|vmm|legacy] as kvqd starts it\n");
  return kUsage;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view first = argc > 1 ? argv[1] : "";
  if (argc == 2 && first == "--list") return list();
  if ((argc != 3 && argc != 5) || first != "--uuid") return usage();
  const std::string_view asked = argc == 5 ? argv[4] : "auto";
  if (argc == 5 && std::string_view(argv[3]) != "--export") return usage();
  std::optional<Exporter> exporter;
  if (asked == name(Exporter::vmm)) exporter = Exporter::vmm;
  if (asked == name(Exporter::legacy)) exporter = Exporter::legacy;
  if (!exporter && asked != "auto") return usage();
  std::string why;
  Result<std::unique_ptr<Backend>> backend = open_cuda(argv[2], exporter, why);
  if (!backend) return fail(why);
  return run_worker(std::move(*backend));
}

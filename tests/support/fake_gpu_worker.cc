// The worker program without a GPU: what kvqd talks to in tests. Its faults come from KVQ_FAKE_GPU (memory_backend.h).
// KVQ_FAKE_GPUS names a file with a line "UUID [faults of this one]" for each GPU that it is to show; without, there is
// one. KVQ_FAKE_GPUS_MEET names a file: then none says anything before as many have been started as are shown.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

#include "tests/support/memory_backend.h"

namespace {

std::string from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// Each worker adds a byte. False: the others did not come.
bool meet(const std::string& path, std::uint64_t workers) {
  std::ofstream(path, std::ios::app) << '.' << std::flush;
  for (int i = 0; i < 1000; ++i) {
    if (std::filesystem::file_size(path) >= workers) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const bool lists = argc == 2 && std::string_view(argv[1]) == "--list";
  const std::string uuid = argc >= 3 && std::string_view(argv[1]) == "--uuid" ? argv[2] : "";
  const std::string exporter = argc == 5 && std::string_view(argv[3]) == "--export" ? argv[4] : "auto";
  std::string text = from_environment("KVQ_FAKE_GPU");
  const std::string shown = from_environment("KVQ_FAKE_GPUS");
  bool found = shown.empty();
  std::uint64_t lines = 0;
  std::ifstream file(shown);
  for (std::string line; std::getline(file, line);) {
    ++lines;
    std::istringstream words(line);
    std::string name, more;
    words >> name >> more;
    if (lists) std::printf("%s memory_files %llu %llu\n", name.c_str(), 1ull << 30, 1ull << 29);
    if (name != uuid) continue;
    found = true;
    if (!more.empty()) text += (text.empty() ? "" : ",") + more;
  }
  kvq::testing::GpuFaults faults = kvq::testing::parse_faults(text);
  if (lists && shown.empty() && faults.no_gpu.empty()) std::printf("%s memory_files 0 0\n", faults.uuid.c_str());
  if (lists && !faults.no_gpu.empty()) std::fprintf(stderr, "kvqd-gpu: %s\n", faults.no_gpu.c_str());
  if (lists) return 0;
  if (!shown.empty()) faults.uuid = uuid;
  if (!found) return kvq::gpu::refuse_worker("no GPU with UUID " + uuid + " is visible");
  const std::string place = from_environment("KVQ_FAKE_GPUS_MEET");
  if (!place.empty() && !meet(place, lines)) return kvq::gpu::refuse_worker("the other workers were not started");
  if (!faults.no_gpu.empty()) return kvq::gpu::refuse_worker(faults.no_gpu);
  if (faults.no_vmm && exporter == "vmm") return kvq::gpu::refuse_worker("no descriptors of this GPU's memory");
  faults.legacy = faults.legacy || exporter == "legacy" || (faults.no_vmm && exporter == "auto");
  return kvq::gpu::run_worker(kvq::testing::make_memory_backend(faults));
}

// Beside kvqctl, as built, or where the build installs it.
#include "tools/kvqctl/exec_bench.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "tools/kvqctl/admin_client.h"

#ifndef KVQ_BENCH_DIRECTORY
#error "KVQ_BENCH_DIRECTORY is where the build installs kvq-bench"
#endif

namespace kvqctl {

void exec_bench(const Options& o) {
  std::error_code unknown;
  const auto here = std::filesystem::read_symlink("/proc/self/exe", unknown).parent_path() / "kvq-bench";
  const std::string program =
      std::filesystem::exists(here, unknown) ? here.string() : std::string(KVQ_BENCH_DIRECTORY) + "/kvq-bench";
  std::vector<std::string> words = {program, "--socket", socket_of(o), "--seconds", std::to_string(o.seconds)};
  if (o.json) words.push_back("--json");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::execv(program.c_str(), argv.data());
  throw Failure(kRefused,
                "cannot run " + program + " (" + std::strerror(errno) + "); install kvq-bench of this release");
}

}  // namespace kvqctl

// Where the programs are that a test starts: where the build made them, or, in a bundle, beside the test itself.
#pragma once

#include <filesystem>
#include <string>

namespace kvq::test {

inline std::string program_path(const char* built) {
  if (std::filesystem::exists(built)) return built;
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / std::filesystem::path(built).filename();
}

}  // namespace kvq::test

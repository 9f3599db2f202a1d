// What libkvq.so shows equals the list beside this test, and nothing else of it can clash with its host.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <string>

namespace {

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command.c_str(), "r"), ::pclose);
  std::string text;
  char chunk[4096];
  while (const std::size_t got = std::fread(chunk, 1, sizeof(chunk), pipe.get())) text.append(chunk, got);
  return text;
}

std::set<std::string> exported() {
  std::set<std::string> names;
  std::string text = output_of("nm -D --defined-only --format=posix '" LIBKVQ_PATH "'");
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    const std::string line = text.substr(at, end - at);
    std::string name = line.substr(0, line.find(' '));
    const bool absolute = line.find(" A ") != std::string::npos;  // the version node KVQ_1 itself
    if (!absolute && !name.empty()) names.insert(name.substr(0, name.find('@')));
    at = end == std::string::npos ? text.size() : end + 1;
  }
  return names;
}

TEST(Exports, EqualTheSymbolList) {
  std::set<std::string> listed;
  std::ifstream file(SYMBOL_LIST_PATH);
  for (std::string line; std::getline(file, line);) listed.insert(line);
  ASSERT_FALSE(listed.empty()) << SYMBOL_LIST_PATH;
  EXPECT_EQ(exported(), listed) << "a new function belongs into the list; a removed one breaks the ABI";
}

TEST(Exports, SonameCarriesTheAbiVersion) {
  EXPECT_NE(output_of("readelf -d '" LIBKVQ_PATH "'").find("[libkvq.so.1]"), std::string::npos);
}

}  // namespace

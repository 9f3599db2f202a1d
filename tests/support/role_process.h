// A second process of a test: the test's own program, started again with --role=NAME, talked to line by line.
//
// Invariant: a role starts by exec, never by fork alone, so that it shares no thread, mapping or handle with the test.
// It ends when its function returns or when the test kills it; the destructor kills and waits.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace kvq::test {

using Arguments = std::vector<std::string>;

// Registers `body` as a role; use KVQ_ROLE. Its return value is the process's exit code.
struct Role {
  Role(const char* name, std::function<int(const Arguments&)> body);
};
#define KVQ_ROLE(name)                                                   \
  static int role_##name(const ::kvq::test::Arguments& arguments);       \
  static const ::kvq::test::Role role_object_##name(#name, role_##name); \
  static int role_##name([[maybe_unused]] const ::kvq::test::Arguments& arguments)

// In a role: says a line to the test; waits for a line of the test ("" when the test is gone).
void say(const std::string& line);
std::string hear();

class RoleProcess {
 public:
  explicit RoleProcess(const std::string& role, const Arguments& arguments = {});
  ~RoleProcess();
  RoleProcess(const RoleProcess&) = delete;
  RoleProcess& operator=(const RoleProcess&) = delete;

  pid_t pid() const { return pid_; }
  void say(const std::string& line);
  // The role's next line; throws std::runtime_error when it ended or said nothing for a minute.
  std::string hear();
  int wait();  // for its end; returns the exit code, or minus the signal
  int kill();  // SIGKILL, then wait

 private:
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  std::string buffer_;
};

// main of a program with roles: runs the role, or all tests.
int main_with_roles(int argc, char** argv);

}  // namespace kvq::test

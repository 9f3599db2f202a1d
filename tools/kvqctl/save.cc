// Read, change one line, parse, write beside it, rename.
#include "tools/kvqctl/save.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "daemon/config.h"
#include "daemon/config_edit.h"
#include "tools/kvqctl/admin_client.h"

namespace kvqctl {
namespace {

constexpr std::size_t kMostBytes = 4 << 20;  // of a configuration file

[[noreturn]] void not_saved(const std::string& why) { throw Failure(kRefused, "not saved: " + why); }

[[noreturn]] void cannot(const std::string& what, const std::string& path) {
  const int error = errno;
  const bool denied = error == EACCES || error == EPERM || error == EROFS;
  not_saved("cannot " + what + " " + path + " (" + std::strerror(error) + "); " +
            (denied ? "run kvqctl as a user who may, where the file system may be written"
                    : "see to that, and say it again"));
}

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

std::string read_all(const File& file, const std::string& path) {
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t got = ::read(file.fd(), buffer, sizeof(buffer));
    if (got < 0) cannot("read", path);
    if (got == 0) return text;
    text.append(buffer, static_cast<std::size_t>(got));
    if (text.size() > kMostBytes) not_saved(path + " is larger than any configuration");
  }
}

void write_all(const File& file, const std::string& text, const std::string& path) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t put = ::write(file.fd(), text.data() + done, text.size() - done);
    if (put < 0) cannot("write", path);
    done += static_cast<std::size_t>(put);
  }
}

// What kvqd itself would say to its command line with `path` in place of the file it has.
void check(const std::vector<std::string>& command_line, const std::string& path, const std::string& file) {
  std::vector<const char*> argv = {"kvqd", "--check-config"};
  const std::string option = "--config=" + path;
  bool replaces = false;
  for (const std::string& word : command_line) {
    if (replaces || word.rfind("--config=", 0) == 0) {
      replaces = false;
    } else if (word == "--config") {
      replaces = true;
    } else {
      argv.push_back(word.c_str());
    }
  }
  argv.push_back(option.c_str());
  const kvq::CommandLine said = kvq::parse_command_line(static_cast<int>(argv.size()), argv.data());
  if (said.exit_code == kvq::ExitCode::ok) return;
  std::string why = said.message;
  for (std::size_t at; (at = why.find(path)) != why.npos;) why.replace(at, path.size(), file);
  not_saved("kvqd would not start with it: " + why);
}

// The words of kvqd's command line win over the file.
void check_is_not_overridden(const std::vector<std::string>& command_line, const std::string& key,
                             const std::string& file) {
  std::string option = "--" + key;
  std::replace(option.begin(), option.end(), '_', '-');
  for (const std::string& word : command_line) {
    if (word != option && word.rfind(option + "=", 0) != 0) continue;
    not_saved("kvqd was started with " + option + ", which wins over " + file + "; change it where kvqd is started");
  }
}

// A name for the new text beside the file; it is gone again unless it was put in the file's place.
class Beside {
 public:
  explicit Beside(const std::string& file) : path_(file + ".XXXXXX") {
    fd_ = ::mkostemp(path_.data(), O_CLOEXEC);
    if (fd_ < 0) cannot("make a file in the folder of", file);
  }
  ~Beside() {
    if (fd_ >= 0) ::close(fd_);
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  void take_place_of(const std::string& file) {
    if (::rename(path_.c_str(), file.c_str()) != 0) cannot("replace", file);
    path_.clear();
  }

 private:
  std::string path_;
  int fd_ = -1;
};

bool is_same(const struct stat& a, const struct stat& b) {
  return a.st_ino == b.st_ino && a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec &&
         a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

void replace(const std::string& file, const struct stat& old, const std::string& text,
             const std::vector<std::string>& command_line) {
  Beside beside(file);
  const File fd(::dup(beside.fd()));
  write_all(fd, text, beside.path());
  if ((old.st_uid != ::geteuid() || old.st_gid != ::getegid()) && ::fchown(fd.fd(), old.st_uid, old.st_gid) != 0) {
    cannot("give the owner of the old file to the new", file);
  }
  if (::fchmod(fd.fd(), old.st_mode & 07777) != 0) cannot("set the mode of", beside.path());
  if (::fsync(fd.fd()) != 0) cannot("write", beside.path());
  check(command_line, beside.path(), file);
  struct stat now {};
  if (::stat(file.c_str(), &now) != 0 || !is_same(old, now)) not_saved(file + " was changed meanwhile; say it again");
  beside.take_place_of(file);
  const File folder(::open(file.substr(0, file.rfind('/') + 1).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.fd() >= 0) ::fsync(folder.fd());
}

}  // namespace

Saved save_setting(const nlohmann::ordered_json& status, const std::string& key, const std::string& value,
                   bool check_only) {
  const std::string named = status.at("config_file");
  if (named.empty()) {
    not_saved("kvqd runs without a configuration file; start it with --config /etc/kvq/kvqd.toml (the unit does)");
  }
  const std::vector<std::string> command_line = status.at("command_line");
  check_is_not_overridden(command_line, key, named);
  char* real = ::realpath(named.c_str(), nullptr);  // the file itself, where the name is a link
  if (real == nullptr) cannot("find", named);
  const std::string path = real;
  std::free(real);
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat old {};
  if (file.fd() < 0 || ::fstat(file.fd(), &old) != 0) cannot("read", path);
  const std::string text = read_all(file, path);
  kvq::ConfigEdit edit;
  try {
    edit = kvq::edit_config(text, path, key, value);
  } catch (const kvq::StartupError& error) {
    not_saved(error.what());
  }
  if (check_only) {
    const File copy(::memfd_create("kvqctl", MFD_CLOEXEC));
    if (copy.fd() < 0) cannot("make a copy of", path);
    write_all(copy, edit.text, path);
    check(command_line, "/proc/self/fd/" + std::to_string(copy.fd()), path);
  } else if (edit.text != text) {
    replace(path, old, edit.text, command_line);
  }
  return {path, edit.line};
}

}  // namespace kvqctl

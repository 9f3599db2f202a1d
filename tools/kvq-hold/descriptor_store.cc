// Linear in what is held, which is at most some thousands.
#include "tools/kvq-hold/descriptor_store.h"

#include <linux/kcmp.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvq_hold {
namespace {

// One text in an environment may have 128 KiB, and LISTEN_FDNAMES names all that is handed on. The rest is for its own
// name and that of the listening socket.
constexpr std::size_t kMostNameBytes = 128 * 1024 - 1024;

}  // namespace

DescriptorStore::~DescriptorStore() {
  for (const Entry& entry : entries_) ::close(entry.fd);
}

std::string DescriptorStore::add(const std::string& name, int fd) {
  struct stat status {};
  std::string problem;
  if (::fstat(fd, &status) != 0) problem = std::strerror(errno);
  const Entry entry{name, fd, status.st_dev, status.st_ino};
  if (entries_.size() >= most_) {
    problem = std::to_string(entries_.size()) +
              " descriptors are held, which is the limit: raise --max-descriptors and ulimit -n";
  } else if (name_bytes_ + name.size() + 1 > kMostNameBytes) {
    problem = "the names of " + std::to_string(entries_.size()) +
              " descriptors fill what one environment variable can hold: use fewer, such as larger slabs";
  } else if (problem.empty()) {
    if (const Entry* same = same_open_file(entry)) {
      problem = same->name == name ? "" : "it is the same open file as " + same->name + ", and such is held once";
    } else {
      entries_.push_back(entry);
      name_bytes_ += name.size() + 1;
      return "";
    }
  }
  ::close(fd);
  return problem;
}

void DescriptorStore::remove(const std::string& name) {
  std::erase_if(entries_, [&](const Entry& entry) {
    if (entry.name != name) return false;
    ::close(entry.fd);
    name_bytes_ -= name.size() + 1;
    return true;
  });
}

const DescriptorStore::Entry* DescriptorStore::same_open_file(const Entry& entry) const {
  const pid_t self = ::getpid();
  const auto same = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& held) {
    return held.device == entry.device && held.file == entry.file &&
           ::syscall(SYS_kcmp, self, self, KCMP_FILE, held.fd, entry.fd) == 0;
  });
  return same == entries_.end() ? nullptr : &*same;
}

}  // namespace kvq_hold

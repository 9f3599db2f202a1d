// Descriptors by name, as a service manager stores them: several may share a name, the same open file is stored once.
//
// Invariant: every descriptor given to add() is owned here or closed; what is held can be handed to one new process, so
// its number and the length of its names stay below what the kernel passes on.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace kvq_hold {

class DescriptorStore {
 public:
  struct Entry {
    std::string name;
    int fd = -1;
    dev_t device = 0;
    ino_t file = 0;
  };

  explicit DescriptorStore(std::size_t most) : most_(most) {}
  ~DescriptorStore();
  DescriptorStore(const DescriptorStore&) = delete;
  DescriptorStore& operator=(const DescriptorStore&) = delete;

  // Takes `fd`. Empty when it is held now, else why not.
  std::string add(const std::string& name, int fd);
  void remove(const std::string& name);                           // all of that name
  const std::vector<Entry>& entries() const { return entries_; }  // oldest first
  std::size_t size() const { return entries_.size(); }

 private:
  const Entry* same_open_file(const Entry& entry) const;

  std::vector<Entry> entries_;
  std::size_t most_;
  std::size_t name_bytes_ = 0;
};

}  // namespace kvq_hold

// FDSTORE and FDSTOREREMOVE of the notify protocol.
#include "daemon/keeper.h"

#include <algorithm>

#include "kvq/result.h"

namespace kvq {
namespace {

constexpr std::size_t kLongestName = 64;

bool valid(const std::string& name) {
  return !name.empty() && name.size() <= kLongestName && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
  });
}

}  // namespace

ServiceKeeper::ServiceKeeper(Notify& notify, const Kept& kept) : notify_(notify) {
  for (const auto& [name, fd] : kept) names_.insert(name);
}

void ServiceKeeper::keep(const std::string& name, int fd) {
  KVQ_ASSERT(valid(name) && fd >= 0);
  if (!active()) return;
  if (names_.contains(name)) forget(name);  // the manager would hold both
  names_.insert(name);
  // FDPOLL=0: an eventfd or pidfd that becomes readable is no reason to drop it.
  notify_.send("FDSTORE=1\nFDNAME=" + name + "\nFDPOLL=0", fd);
}

void ServiceKeeper::forget(const std::string& name) {
  KVQ_ASSERT(valid(name));
  names_.erase(name);
  notify_.send("FDSTOREREMOVE=1\nFDNAME=" + name);
}

void ServiceKeeper::forget_all() {
  while (!names_.empty()) forget(std::string(*names_.begin()));
}

}  // namespace kvq

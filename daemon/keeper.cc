// FDSTORE and FDSTOREREMOVE of the notify protocol.
#include "daemon/keeper.h"

#include <algorithm>
#include <cstdio>

#include "kvq/result.h"

namespace kvq {
namespace {

constexpr std::size_t kLongestName = 64;
constexpr std::string_view kHost = "kvq-";
constexpr std::size_t kMarkDigits = 8;

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

std::string kept_prefix(const std::string& uuid) {
  if (uuid.empty()) return std::string(kHost);
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : uuid) hash = (hash ^ static_cast<std::uint8_t>(c)) * 16777619u;
  char mark[kMarkDigits + 2];
  std::snprintf(mark, sizeof mark, "%08x-", hash);
  return std::string(kHost) + mark;
}

std::string prefix_of(const std::string& name) {
  const std::size_t end = kHost.size() + kMarkDigits;
  const bool marked =
      name.size() > end && name[end] == '-' && name.find_first_not_of("0123456789abcdef", kHost.size()) == end;
  return marked ? name.substr(0, end + 1) : std::string(kHost);
}

std::string PartKeeper::marked(const std::string& name) const {
  KVQ_ASSERT(name.starts_with(kHost));
  return prefix_ + name.substr(kHost.size());
}

void PartKeeper::forget_all() {
  const std::set<std::string> names = all_.names();
  for (const std::string& name : names) {
    if (prefix_of(name) == prefix_) all_.forget(name);
  }
}

Kept PartKeeper::take(Kept& all) const {
  Kept out;
  for (auto it = all.begin(); it != all.end();) {
    if (prefix_of(it->first) != prefix_) {
      ++it;
      continue;
    }
    out.emplace(std::string(kHost) + it->first.substr(prefix_.size()), std::move(it->second));
    it = all.erase(it);
  }
  return out;
}

}  // namespace kvq

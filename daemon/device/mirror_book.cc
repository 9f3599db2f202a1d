// Rewriting reads the directory at the time of sending, so it never brings back what a later publication has replaced.
#include "daemon/device/mirror_book.h"

#include <algorithm>
#include <utility>

namespace kvq {
namespace {

constexpr std::uint64_t kRetryMs = 1000;

}  // namespace

void MirrorBook::add(TenantId tenant, const DirectoryEntry* entries, std::uint32_t capacity, Descriptor adopted) {
  Mirror mirror;
  mirror.entries = entries;
  mirror.capacity = capacity;
  mirror.file = std::move(adopted);
  mirrors_[tenant] = std::move(mirror);
}

void MirrorBook::publish(WorkerLink* link, TenantId tenant, PageId page, std::uint64_t entry) {
  ++count_;
  if (!flowing_) return;  // all is written anew when a worker serves again
  Write write{count_, tenant, raw(page), 1, entry, false};
  if (link == nullptr || !waiting_.empty() || !send(*link, write)) waiting_.push_back(write);
}

int MirrorBook::descriptor(TenantId tenant, std::uint64_t seen) const {
  const auto found = mirrors_.find(tenant);
  return found == mirrors_.end() || seen < found->second.visible_at ? -1 : found->second.file.get();
}

void MirrorBook::restart(WorkerLink& link) {
  KVQ_ASSERT(!flowing_ && waiting_.empty());
  flowing_ = true;
  rewritten_at_ = 0;
  for (auto& [tenant, mirror] : mirrors_) {
    mirror.asked = mirror.in_place = false;
    ask(link, tenant, mirror);
    if (mirror.file.get() >= 0) rewrite(tenant, mirror);
  }
  rewritten_at_ = count_;
  if (waiting_.empty()) seen_ = count_;  // nobody reads a mirror
}

void MirrorBook::stop(std::uint64_t written) {
  if (!flowing_) return;
  seen_ = seen(written);
  flowing_ = false;
  adopting_ = 0;
  waiting_.clear();
  // One that nobody has been given yet is made anew.
  for (auto& [tenant, mirror] : mirrors_) {
    if (mirror.visible_at > seen_) mirror.file = Descriptor();
  }
}

void MirrorBook::ask(WorkerLink& link, TenantId tenant, Mirror& mirror) {
  mirror.asked = true;
  const bool adopts = mirror.file.get() >= 0;
  adopting_ += adopts ? 1 : 0;
  link.socket().send({.kind = adopts ? gpu::MessageKind::adopt_mirror : gpu::MessageKind::mirror,
                      .index = raw(tenant),
                      .count = mirror.capacity},
                     mirror.file.get());
}

void MirrorBook::rewrite(TenantId tenant, Mirror& mirror) {
  waiting_.push_back({count_ + 1, tenant, 0, mirror.capacity, 0, true});
  count_ += mirror.capacity;
}

void MirrorBook::made(TenantId tenant, Descriptor file) {
  const auto found = mirrors_.find(tenant);
  if (found == mirrors_.end() || file.get() < 0) return;
  Mirror& mirror = found->second;
  mirror.file = std::move(file);
  mirror.in_place = true;
  mirror.problem.clear();
  rewrite(tenant, mirror);
  mirror.visible_at = count_;
}

void MirrorBook::refused(TenantId tenant, std::string why, std::uint64_t now_ms) {
  const auto found = mirrors_.find(tenant);
  if (found == mirrors_.end()) return;
  found->second.problem = std::move(why);
  found->second.asked = false;
  found->second.retry_ms = now_ms + kRetryMs;
}

void MirrorBook::adopted(TenantId tenant) {
  const auto found = mirrors_.find(tenant);
  if (found == mirrors_.end() || found->second.in_place) return;
  found->second.in_place = true;
  --adopting_;
}

void MirrorBook::advance(WorkerLink& link, std::uint64_t now_ms) {
  if (!flowing_) return;
  for (auto& [tenant, mirror] : mirrors_) {
    if (mirror.asked || now_ms < mirror.retry_ms) continue;
    const bool adopts = mirror.file.get() >= 0;
    ask(link, tenant, mirror);
    if (adopts) {  // of an earlier daemon
      rewrite(tenant, mirror);
      rewritten_at_ = count_;
    }
  }
  while (!waiting_.empty() && send(link, waiting_.front())) waiting_.pop_front();
}

bool MirrorBook::send(WorkerLink& link, Write& write) {
  const Mirror* mirror = nullptr;
  if (write.rewrites) mirror = &mirrors_.at(write.tenant);
  while (write.count > 0) {
    const std::uint64_t entry =
        mirror != nullptr ? mirror->entries[write.page].load(std::memory_order_relaxed) : write.entry;
    if (!link.push_entry({write.first_sequence, raw(write.tenant), write.page, entry})) return false;
    ++write.first_sequence;
    ++write.page;
    --write.count;
  }
  return true;
}

std::uint64_t MirrorBook::held_bytes(std::uint64_t granularity) const {
  std::uint64_t bytes = 0;
  for (const auto& [tenant, mirror] : mirrors_) {
    if (mirror.file.get() >= 0) bytes += round_up(std::uint64_t{mirror.capacity} * sizeof(DirectoryEntry), granularity);
  }
  return bytes;
}

std::string MirrorBook::problem() const {
  for (const auto& [tenant, mirror] : mirrors_) {
    if (!mirror.problem.empty()) return "mirror of tenant " + std::to_string(raw(tenant)) + ": " + mirror.problem;
  }
  return "";
}

}  // namespace kvq

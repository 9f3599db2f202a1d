// Every change is told to the worker at once, if there is one; the socket keeps the order.
#include "daemon/device/slab_book.h"

#include <algorithm>
#include <utility>

namespace kvq {

void SlabBook::start(std::uint64_t slab_bytes, std::uint32_t slabs, std::uint32_t places, bool files) {
  slab_bytes_ = slab_bytes;
  limit_ = slabs;
  files_ = files;
  slabs_.resize(places);
}

std::uint32_t SlabBook::placed() const {
  const auto placed = std::count_if(slabs_.begin(), slabs_.end(), [](const auto& slab) { return slab.has_value(); });
  return static_cast<std::uint32_t>(placed);
}

std::uint32_t SlabBook::missing() const {
  const std::uint32_t have = placed() + spares();
  return limit_ > have ? limit_ - have : 0;
}

std::uint32_t SlabBook::surplus() const {
  const std::uint32_t have = placed() + spares();
  return have > limit_ ? std::min(have - limit_, spares()) : 0;
}

std::uint64_t SlabBook::held_bytes() const { return (std::uint64_t{placed()} + spares()) * slab_bytes_; }

void SlabBook::add_spare(std::uint32_t index, std::uint64_t serial, Descriptor file) {
  if (file.get() >= 0 && serial != 0) spares_.push_back({index, serial, std::move(file)});
}

Result<Descriptor> SlabBook::reader_of(const Descriptor& file) const {
  if (!files_) return Descriptor();
  return reopen_read_only(file);
}

Result<void> SlabBook::create(WorkerLink& link, SlabId slab) {
  KVQ_ASSERT(raw(slab) < slabs_.size() && !slabs_[raw(slab)]);
  const auto spare = std::find_if(spares_.begin(), spares_.end(),
                                  [slab](const Spare& s) { return s.index == gpu::kAnySlab || s.index == raw(slab); });
  if (spare == spares_.end()) return Error{Errc::no_memory, 0, "the GPU worker has no spare slab now"};
  Result<Descriptor> reader = reader_of(spare->file);
  if (!reader) return reader.error();
  slabs_[raw(slab)] = Slab{std::move(spare->file), std::move(*reader), spare->serial, true, "", Errc::ok};
  link.socket().send({.kind = gpu::MessageKind::place, .index = raw(slab), .serial = spare->serial});
  spares_.erase(spare);
  return {};
}

Result<void> SlabBook::adopt(WorkerLink& link, SlabId slab, Descriptor& file, std::uint64_t serial) {
  KVQ_ASSERT(raw(slab) < slabs_.size() && !slabs_[raw(slab)]);
  if (file.get() < 0 || serial == 0) return Error{Errc::invalid_argument, 0, "no such descriptor"};
  if (files_) {
    if (const Result<void> good = check_memory_file(file, slab_bytes_); !good) return good.error();
  }
  Result<Descriptor> reader = reader_of(file);
  if (!reader) return reader.error();
  slabs_[raw(slab)] = Slab{std::move(file), std::move(*reader), serial, false, "", Errc::ok};
  send_adopt(link, slab);
  return {};
}

void SlabBook::send_adopt(WorkerLink& link, SlabId slab) {
  Slab& s = *slabs_[raw(slab)];
  s.in_place = false;
  s.problem.clear();
  s.refusal = Errc::ok;
  link.socket().send({.kind = gpu::MessageKind::adopt, .index = raw(slab), .serial = s.serial, .bytes = slab_bytes_},
                     s.file.get());
}

void SlabBook::destroy(WorkerLink* link, SlabId slab) {
  KVQ_ASSERT(raw(slab) < slabs_.size() && slabs_[raw(slab)]);
  slabs_[raw(slab)].reset();
  if (link == nullptr) return;
  link->socket().send({.kind = gpu::MessageKind::release, .index = raw(slab), .count = missing() > 0 ? 1u : 0u});
}

const SlabBook::Slab& SlabBook::slab(SlabId slab) const {
  KVQ_ASSERT(raw(slab) < slabs_.size() && slabs_[raw(slab)]);
  return *slabs_[raw(slab)];
}

void SlabBook::adopted(SlabId slab) {
  if (raw(slab) < slabs_.size() && slabs_[raw(slab)]) slabs_[raw(slab)]->in_place = true;
}

void SlabBook::refused(SlabId slab, Errc code, std::string why) {
  if (raw(slab) >= slabs_.size() || !slabs_[raw(slab)]) return;
  slabs_[raw(slab)]->in_place = false;
  slabs_[raw(slab)]->problem = std::move(why);
  slabs_[raw(slab)]->refusal = code;
}

void SlabBook::restart(WorkerLink& link) {
  for (std::uint32_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i]) send_adopt(link, SlabId{i});
  }
}

void SlabBook::drop_spare(WorkerLink& link) {
  const auto free = std::find_if(slabs_.begin(), slabs_.end(), [](const auto& slab) { return !slab; });
  KVQ_ASSERT(!spares_.empty() && free != slabs_.end());
  const auto place = static_cast<std::uint32_t>(free - slabs_.begin());
  link.socket().send({.kind = gpu::MessageKind::place, .index = place, .serial = spares_.back().serial});
  link.socket().send({.kind = gpu::MessageKind::release, .index = place});
  spares_.pop_back();
}

std::string SlabBook::problem() const {
  std::uint32_t refused = 0;
  std::string first;
  for (std::uint32_t i = 0; i < slabs_.size(); ++i) {
    if (!slabs_[i] || slabs_[i]->problem.empty()) continue;
    if (refused++ == 0) first = "slab " + std::to_string(i) + ": " + slabs_[i]->problem;
  }
  if (refused == 0) return "";
  return std::to_string(refused) + " slabs are out of the GPU worker's reach, " + first;
}

}  // namespace kvq

// Adopt, else start clean and say why.
#include "daemon/make_store.h"

namespace kvq {
namespace {

constexpr char kRoot[] = "kvq-root";

// Empty: made.store is there. Else why what was kept is not taken.
std::string adopt(const StoreParts& parts, PartKeeper& keeper, Kept& kept, std::uint64_t now_ms, MadeStore& made) {
  if (!keeper.active()) return "descriptors without NOTIFY_SOCKET: what is taken over could not be kept on";
  if (!kept.contains(kRoot)) return std::to_string(kept.size()) + " descriptors without " + kRoot;
  made.device = parts.make_device(kept_arena(kept));
  if (!made.device->can_adopt()) return "the GPU's memory is passed on by legacy handles and ended with its worker";
  std::string why_not;
  auto store = Store::adopt(parts.config, *made.device, parts.deliver, parts.log, keeper, kept, why_not, now_ms);
  if (!store) return why_not.empty() ? store.error().context : why_not;
  made.store = std::move(*store);
  return "";
}

std::string adopted_text(const Store& store) {
  const AdoptReport report = store.status().adopt;
  return "sessions=" + std::to_string(report.sessions) + " sequences=" + std::to_string(report.sequences) +
         " pages=" + std::to_string(report.pages) + " slabs=" + std::to_string(report.slabs) +
         " undone_bytes=" + std::to_string(report.undone_bytes);
}

}  // namespace

MadeStore make_store(const StoreParts& parts, PartKeeper& keeper, Kept kept, std::uint64_t now_ms) {
  MadeStore made;
  made.state = "new";
  std::string why_not;
  if (!kept.empty()) {
    why_not = adopt(parts, keeper, kept, now_ms, made);
    if (made.store != nullptr) {
      made.sessions = std::move(kept);
      made.state = "adopted " + adopted_text(*made.store);
      parts.log("event=adopted " + adopted_text(*made.store));
      return made;
    }
    made.state = "new, since what an earlier kvqd left was refused: " + why_not;
    parts.log("event=adopt_refused why=\"" + why_not + "\"");
    keeper.forget_all();
    made.device.reset();
  }
  made.device = parts.make_device(std::nullopt);
  made.store = Store::create(parts.config, *made.device, parts.deliver, parts.log, keeper.active() ? &keeper : nullptr,
                             std::move(why_not));
  return made;
}

}  // namespace kvq

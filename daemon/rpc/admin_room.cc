// Asks each store, adds up what they say.
#include "daemon/rpc/admin_room.h"

#include "daemon/rpc/wire.h"
#include "kvq/result.h"

namespace kvq {
namespace {

using Json = nlohmann::ordered_json;

// As kvqctl and the configuration take it, exactly.
std::string size_text(std::uint64_t bytes) {
  const char* const units[] = {"", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; unit < 4 && bytes != 0 && bytes % 1024 == 0; ++unit) bytes /= 1024;
  return std::to_string(bytes) + units[unit];
}

Refusal not_resized(const ServedDevice& device, Errc code, std::uint64_t bytes, const std::string& why) {
  return {code, "the arena of " + device.name() + " cannot become " + size_text(bytes) + ": " + why};
}

// What the store would say, with the numbers.
std::optional<Refusal> check_resize(ServedDevice& device, std::uint64_t bytes) {
  const StoreStatus s = device.sessions.store().status();
  if (s.device.exporter == "legacy") {
    return not_resized(device, Errc::limit_reached, bytes,
                       "its memory is passed on by legacy handles, so it is one allocation of " +
                           size_text(s.target_bytes) + "; change arena_bytes and start kvqd again");
  }
  const std::uint64_t least = (s.slabs_reserved + std::uint64_t{1}) * s.slab_bytes;
  if (bytes < least) {
    return not_resized(device, Errc::invalid_argument, bytes,
                       "it needs a slab beside what is kept for transcodes, " + size_text(least) + " at least");
  }
  if (bytes > s.most_bytes) {
    return not_resized(device, Errc::limit_reached, bytes,
                       "addresses for " + size_text(s.most_bytes) +
                           " were reserved at the start; for more, raise arena_bytes, drain, and start kvqd again");
  }
  if (const std::uint64_t rest = bytes % s.slab_bytes; rest != 0) {
    return not_resized(device, Errc::invalid_argument, bytes,
                       "it is whole slabs of " + size_text(s.slab_bytes) + ", so " + size_text(bytes - rest) + " or " +
                           size_text(bytes - rest + s.slab_bytes));
  }
  return std::nullopt;
}

Json resize_arena(ServedDevice& device, std::uint64_t bytes, bool dry_run) {
  Sessions& sessions = device.sessions;
  const Result<ResizeReport> report = sessions.store().resize(bytes, dry_run);
  KVQ_ASSERT(report);  // it was checked
  sessions.settle();
  sessions.ticker().soon();
  if (!dry_run) {
    device.options.log("event=resize_asked device=" + device.name() + " arena_bytes=" + std::to_string(bytes) +
                       " arena_bytes_before=" + std::to_string(report->bytes_before) +
                       " slabs_over=" + std::to_string(report->slabs_over));
  }
  return {{"device", device.name()},
          {"arena_bytes", bytes},
          {"arena_bytes_before", report->bytes_before},
          {"slabs_used", report->slabs_used},
          {"slabs_over", report->slabs_over}};
}

template <typename Ask>
void ask(const Where& where, Ask ask_store) {
  for (const auto& [device, only] : where) {
    Sessions& sessions = device->sessions;
    ask_store(sessions.store(), only, sessions.now_ms());
    sessions.settle();
    sessions.ticker().soon();
  }
}

}  // namespace

Json evict_cached(const Devices& devices, const Where& where, std::uint64_t idle_ms, bool dry_run) {
  DropReport sum;
  ask(where, [&](Store& store, std::optional<TenantId> only, std::uint64_t now_ms) {
    const DropReport report = store.drop_cached(only, idle_ms, dry_run, now_ms);
    sum.pages += report.pages;
    sum.bytes += report.bytes;
  });
  if (!dry_run) {
    devices.options().log("event=evict_asked pages=" + std::to_string(sum.pages) +
                          " bytes=" + std::to_string(sum.bytes) + " idle_ms=" + std::to_string(idle_ms));
  }
  return {{"dry_run", dry_run}, {"pages", sum.pages}, {"bytes", sum.bytes}};
}

std::optional<Refusal> resize_arenas(const Devices& devices, const std::string& name, std::uint64_t arena_bytes,
                                     bool dry_run, Json& report) {
  if (!name.empty() && devices.find(name) == nullptr) {
    return Refusal{Errc::invalid_argument,
                   "no device is called \"" + printable(name, 80) + "\"; kvqctl status names them"};
  }
  const auto meant = [&](const ServedDevice& device) { return name.empty() || device.name() == name; };
  for (const auto& device : devices) {
    if (!meant(*device)) continue;
    if (auto refusal = check_resize(*device, arena_bytes)) return refusal;
  }
  Json list = Json::array();
  for (const auto& device : devices) {
    if (meant(*device)) list.push_back(resize_arena(*device, arena_bytes, dry_run));
  }
  report = {{"dry_run", dry_run}};
  if (list.size() == 1) {
    report.update(list.front());
  } else {
    report["devices"] = std::move(list);
  }
  return std::nullopt;
}

Json compact_slabs(const Devices& devices, const Where& where, bool dry_run) {
  CompactReport sum;
  ask(where, [&](Store& store, std::optional<TenantId> only, std::uint64_t now_ms) {
    const CompactReport report = store.compact(only, dry_run, now_ms);
    sum.pages += report.pages;
    sum.bytes += report.bytes;
    sum.slabs += report.slabs;
  });
  if (!dry_run) {
    devices.options().log("event=compact_asked pages=" + std::to_string(sum.pages) +
                          " bytes=" + std::to_string(sum.bytes) + " slabs=" + std::to_string(sum.slabs));
  }
  return {{"dry_run", dry_run}, {"pages", sum.pages}, {"bytes", sum.bytes}, {"slabs", sum.slabs}};
}

}  // namespace kvq

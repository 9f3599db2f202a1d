// Asks each store, adds up what they say.
#include "daemon/rpc/admin_room.h"

namespace kvq {
namespace {

using Json = nlohmann::ordered_json;

template <typename Ask>
void ask(const TenantOnDevices& where, Ask ask_store) {
  for (const auto& [device, only] : where) {
    Sessions& sessions = device->sessions;
    ask_store(sessions.store(), only, sessions.now_ms());
    sessions.settle();
    sessions.ticker().soon();
  }
}

}  // namespace

Json evict_cached(const Devices& devices, const TenantOnDevices& where, std::uint64_t idle_ms, bool dry_run) {
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

Json compact_slabs(const Devices& devices, const TenantOnDevices& where, bool dry_run) {
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

// First every device's claim on what was left, then all workers, then the devices one after the other.
#include "daemon/parts.h"

#include <algorithm>
#include <set>

#include "daemon/setup.h"

namespace kvq {
namespace {

struct Claim {
  Part part;
  Kept kept;
  WorkerLink worker;  // started, and not yet heard; of a GPU
};

// Each device takes its own of `kept`, and numbers for its sessions: those it had, or the lowest that are free.
std::vector<Claim> claim(const PartsOptions& options, const std::vector<std::string>& uuids, Kept& kept) {
  std::vector<Claim> claims;
  std::set<std::string> prefixes;
  std::set<std::uint32_t> ranges;
  for (const std::string& uuid : uuids) {
    if (!prefixes.insert(kept_prefix(uuid)).second) {
      throw StartupError(ExitCode::environment, "device " + uuid + ": its mark " + kept_prefix(uuid) +
                                                    " is that of another GPU, too; serve them by two kvqds");
    }
    Claim c{
        {.uuid = uuid, .keeper = std::make_unique<PartKeeper>(options.keeper, kept_prefix(uuid)), .made = {}}, {}, {}};
    c.kept = c.part.keeper->take(kept);
    if (const auto arena = kept_arena(c.kept)) {
      c.part.session_range = arena->session_range;
      if (!ranges.insert(arena->session_range).second) {
        options.device.log("event=adopt_refused device=" + uuid + " why=\"another device has its sessions' numbers\"");
        c.part.keeper->forget_all();
        c.kept.clear();
      }
    }
    claims.push_back(std::move(c));
  }
  for (Claim& c : claims) {
    if (c.kept.contains("kvq-root") && kept_arena(c.kept)) continue;
    c.part.session_range = 0;
    while (!ranges.insert(c.part.session_range).second) ++c.part.session_range;
  }
  return claims;
}

void make(const PartsOptions& options, Claim& c, std::size_t number, std::uint64_t now_ms) {
  StoreConfig config = options.store;
  config.session_range = c.part.session_range;
  PartKeeper& keeper = *c.part.keeper;
  c.part.made = make_store(
      {.config = config,
       .make_device =
           [&](const auto& kept) { return make_device(options.device, c.part.uuid, keeper, kept, c.worker); },
       .deliver = [deliver = options.deliver, number](const SlabNotice& notice) { deliver(number, notice); },
       .log = options.device.log},
      keeper, std::move(c.kept), now_ms);
}

// What was left of devices that are not served any more: their sessions have ended.
void forget_strangers(const PartsOptions& options, const Parts& parts) {
  std::map<std::string, std::size_t> forgotten;
  const std::set<std::string> names = options.keeper.names();
  for (const std::string& name : names) {
    const std::string prefix = prefix_of(name);
    const bool served = std::any_of(parts.served.begin(), parts.served.end(),
                                    [&](const Part& part) { return kept_prefix(part.uuid) == prefix; });
    if (served) continue;
    options.keeper.forget(name);
    ++forgotten[prefix];
  }
  for (const auto& [prefix, count] : forgotten) {
    options.device.log("event=device_gone names=" + prefix + "* descriptors_dropped=" + std::to_string(count));
  }
}

template <typename Text>
std::string joined(const std::vector<Part>& parts, Text text) {
  std::string out;
  for (const Part& part : parts) out += (out.empty() ? "" : ", ") + text(part);
  return out;
}

}  // namespace

Parts make_parts(const PartsOptions& options, const DeviceChoice& choice, Kept kept, std::uint64_t now_ms) {
  const Config& config = options.device.config;
  end_earlier_workers(kept, options.keeper);
  if (!choice.why_host.empty()) options.device.log("event=device device=host why=\"" + choice.why_host + "\"");
  Parts parts;
  std::optional<DeviceRefused> first;
  bool no_device = true;
  std::vector<Claim> claims = claim(options, choice.uuids, kept);
  for (Claim& c : claims) c.worker = start_worker(config, c.part.uuid);
  for (Claim& c : claims) {
    try {
      make(options, c, parts.served.size(), now_ms);
      parts.served.push_back(std::move(c.part));
    } catch (const DeviceRefused& refused) {
      if (!config.device_uuids.empty()) throw;
      c.part.keeper->forget_all();
      options.device.log(std::string("event=device_not_served why=\"") + refused.what() + "\"");
      parts.not_served.push_back({c.part.uuid, refused.what()});
      if (!first) first.emplace(refused);
      no_device = no_device && refused.no_device;
    }
  }
  if (parts.served.empty()) {
    if (!no_device || !may_fall_back(config)) throw *first;
    options.device.log("event=device device=host why=\"no GPU can be served\"");
    for (Claim& c : claim(options, {""}, kept)) {
      make(options, c, 0, now_ms);
      parts.served.push_back(std::move(c.part));
    }
    parts.not_served.clear();
  }
  forget_strangers(options, parts);
  return parts;
}

std::string devices_text(const Parts& parts) {
  return joined(parts.served, [](const Part& part) { return device_text(*part.made.device); });
}

std::string states_text(const Parts& parts) {
  return joined(parts.served, [&](const Part& part) {
    return (parts.served.size() > 1 ? part.uuid + " " : std::string()) + part.made.state;
  });
}

}  // namespace kvq

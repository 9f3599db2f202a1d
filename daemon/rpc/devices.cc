// Sums and loops over the devices.
#include "daemon/rpc/devices.h"

#include <algorithm>

#include "kvq/result.h"

namespace kvq {
namespace {

template <typename Count>
std::size_t sum(const Devices& devices, Count count) {
  std::size_t out = 0;
  for (const auto& device : devices) out += count(device->sessions);
  return out;
}

template <typename Begin>
kj::Promise<void> all(const Devices& devices, Begin begin) {
  kj::Vector<kj::Promise<void>> promises;
  for (const auto& device : devices) promises.add(begin(device->sessions));
  return kj::joinPromises(promises.releaseAsArray());
}

}  // namespace

ServedDevice::ServedDevice(EventLoop& loop, RpcPart part)
    : options(std::move(part.options)), sessions(loop, part.store, options), tenants(part.store, options) {}

const std::string& ServedDevice::name() const {
  if (!options.served_as.empty()) return options.served_as;
  return options.device_uuid.empty() ? options.device : options.device_uuid;
}

DeviceReport ServedDevice::report() const {
  return {.name = name(),
          .store = sessions.store().status(),
          .counts = sessions.counts(),
          .sessions = sessions.size(),
          .parked = sessions.parked(),
          .ticks = sessions.ticks()};
}

Devices::Devices(EventLoop& loop, std::vector<RpcPart> parts) : loop_(loop) {
  KVQ_ASSERT(!parts.empty());
  for (RpcPart& part : parts) all_.push_back(std::make_unique<ServedDevice>(loop, std::move(part)));
}

std::vector<std::string> Devices::names() const {
  std::vector<std::string> out;
  for (const auto& device : all_) out.push_back(device->name());
  return out;
}

ServedDevice* Devices::find(const std::string& name) const {
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const auto& d) { return d->name() == name; });
  return found == all_.end() ? nullptr : found->get();
}

ServedDevice& Devices::pick(const std::string& name, SessionId session) const {
  if (ServedDevice* named = find(name)) return *named;
  const auto owner = std::find_if(all_.begin(), all_.end(), [&](const auto& d) { return d->sessions.has(session); });
  return owner == all_.end() ? *all_.front() : **owner;
}

std::size_t Devices::sessions() const {
  return sum(*this, [](const Sessions& s) { return s.size(); });
}

std::size_t Devices::parked() const {
  return sum(*this, [](const Sessions& s) { return s.parked(); });
}

std::size_t Devices::owned_by(const Process& process) const {
  return sum(*this, [&](const Sessions& s) { return s.owned_by(process); });
}

std::size_t Devices::of_same_process(const Peer& peer) const {
  return sum(*this, [&](const Sessions& s) { return s.of_same_process(peer); });
}

void Devices::log_refusal(Process& process, const std::string& cause, std::uint64_t limit) const {
  all_.front()->sessions.log_refusal(process, cause, limit);
}

void Devices::watch_end(const std::shared_ptr<Process>& process) const {
  kvq::watch_end(loop_, process, [this](const Process& ended) {
    for (const auto& device : all_) device->sessions.process_ended(ended);
  });
}

void Devices::hung_up(const Process& process) const {
  for (const auto& device : all_) device->sessions.hung_up(process);
}

void Devices::leave() const {
  for (const auto& device : all_) device->sessions.leave();
}

kj::Promise<void> Devices::drain(std::uint32_t deadline_ms) const {
  return all(*this, [&](Sessions& sessions) { return sessions.drain(deadline_ms); });
}

kj::Promise<void> Devices::drained() const {
  return all(*this, [](Sessions& sessions) { return sessions.drained(); });
}

}  // namespace kvq

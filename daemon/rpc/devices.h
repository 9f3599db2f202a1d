// The devices that this kvqd serves, as the rpc room sees them: each with its sessions and its tenants.
//
// Invariant: nothing of one device touches another. A session belongs to the device of its number's range as long as it
// lives; what protects the daemon (sessions of a process, sessions in all) counts over all of them.
#pragma once

#include <memory>

#include "daemon/rpc/sessions.h"

namespace kvq {

struct ServedDevice {
  ServedDevice(EventLoop& loop, RpcPart part);

  const std::string& name() const;  // as clients name it: "host", or a GPU's UUID
  DeviceReport report() const;

  const RpcOptions options;
  Sessions sessions;
  TenantChooser tenants;
};

class Devices {
 public:
  Devices(EventLoop& loop, std::vector<RpcPart> parts);

  const RpcOptions& options() const { return all_.front()->options; }  // what is the daemon's of it
  std::uint64_t now_ms() const { return all_.front()->sessions.now_ms(); }
  std::vector<std::string> names() const;
  bool several() const { return all_.size() > 1; }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }
  ServedDevice& at(std::size_t part) const { return *all_.at(part); }

  // By its name; empty: the one whose session that is, else the first.
  ServedDevice& pick(const std::string& name, SessionId session) const;
  // Null: none has that name.
  ServedDevice* find(const std::string& name) const;

  std::size_t sessions() const;
  std::size_t parked() const;
  std::size_t owned_by(const Process& process) const;
  std::size_t of_same_process(const Peer& peer) const;
  void log_refusal(Process& process, const std::string& cause, std::uint64_t limit = 0) const;

  void watch_end(const std::shared_ptr<Process>& process) const;
  void hung_up(const Process& process) const;
  void leave() const;
  kj::Promise<void> drain(std::uint32_t deadline_ms) const;
  kj::Promise<void> drained() const;

 private:
  EventLoop& loop_;
  std::vector<std::unique_ptr<ServedDevice>> all_;
};

}  // namespace kvq

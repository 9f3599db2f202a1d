// The store's Keeper by the service manager: systemd's descriptor store, or kvq-hold.
//
// Invariant: keeping and forgetting go out in the order of the calls and never wait (notify.h). It knows every name
// that the manager has of this daemon or the one before, so forget_all() leaves nothing there. Each GPU's names carry a
// mark made of its UUID ("kvq-1a2b3c4d-slab-5"), the host's do not ("kvq-slab-5"): whatever order the GPUs are in, a
// device finds its own, and no store sees another's.
#pragma once

#include <set>
#include <string>

#include "daemon/notify.h"
#include "daemon/store.h"

namespace kvq {

class ServiceKeeper final : public Keeper {
 public:
  // `kept`: what the manager handed back, so has still. Inactive when nobody listens to `notify`: then it keeps
  // nothing.
  ServiceKeeper(Notify& notify, const Kept& kept);

  bool active() const { return notify_.active(); }
  void keep(const std::string& name, int fd) override;
  void forget(const std::string& name) override;
  void forget_all();
  const std::set<std::string>& names() const { return names_; }

 private:
  Notify& notify_;
  std::set<std::string> names_;
};

// "kvq-1a2b3c4d-": how the kept names of the GPU of this UUID begin. Empty UUID: "kvq-", the host's.
std::string kept_prefix(const std::string& uuid);
// The prefix of the device that keeps `name`.
std::string prefix_of(const std::string& name);

// The keeper of one device's store: names without the mark on one side, with it on the other.
class PartKeeper final : public Keeper {
 public:
  PartKeeper(ServiceKeeper& all, std::string prefix) : all_(all), prefix_(std::move(prefix)) {}

  bool active() const { return all_.active(); }
  void keep(const std::string& name, int fd) override { all_.keep(marked(name), fd); }
  void forget(const std::string& name) override { all_.forget(marked(name)); }
  void forget_all();  // of this device
  // What `all` has of this device, by the names without the mark.
  Kept take(Kept& all) const;

 private:
  std::string marked(const std::string& name) const;
  ServiceKeeper& all_;
  const std::string prefix_;
};

}  // namespace kvq

// The store's Keeper by the service manager: systemd's descriptor store, or kvq-hold.
//
// Invariant: keeping and forgetting go out in the order of the calls and never wait (notify.h). It knows every name
// that the manager has of this daemon or the one before, so forget_all() leaves nothing there.
#pragma once

#include <set>

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

}  // namespace kvq

// The store at start-up: taken over from an earlier daemon, or new.
//
// Invariant: all that was left is taken, or none of it: after a refusal every name is forgotten and the device is a new
// one, so nothing of a state that is not trusted is served.
#pragma once

#include <functional>
#include <memory>

#include "daemon/keeper.h"

namespace kvq {

struct StoreParts {
  StoreConfig config;
  // Given: what the device of an earlier daemon was, whose memory will be adopted. Throws when there is none to have.
  std::function<std::unique_ptr<Device>(const std::optional<KeptArena>&)> make_device;
  Store::DeliverNotice deliver;
  Store::LogDecision log;
};

struct MadeStore {
  std::unique_ptr<Device> device;
  std::unique_ptr<Store> store;
  std::string state;  // for people: adopted, new, or why not adopted
  Kept sessions;      // what the adopted sessions' descriptors are besides the store's own: for the rpc room
};

MadeStore make_store(const StoreParts& parts, PartKeeper& keeper, Kept kept, std::uint64_t now_ms);

}  // namespace kvq

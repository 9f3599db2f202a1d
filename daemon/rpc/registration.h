// What a client asks for when it registers a model, checked.
//
// Invariant: nothing of a Registration reaches the store before check_registration() has accepted all of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/store.h"
#include "kvq/protocol.capnp.h"

namespace kvq {

struct Refusal {
  Errc code = Errc::ok;
  std::string message;  // names the value and what is allowed
};

// Fills `request` (all but tenant and pid). Returns why not. `devices`: what this kvqd serves, "host" or GPUs' UUIDs.
std::optional<Refusal> check_registration(wire::Registration::Reader registration,
                                          const std::vector<std::string>& devices, SessionRequest& request);

}  // namespace kvq

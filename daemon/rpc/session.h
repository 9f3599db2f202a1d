// The capabilities that a client holds: Node, one per connection, and Session, one per registered model.
//
// Invariant: a Session capability is the only way to a session, it is given to one connection, and dropping it (or the
// connection) closes the session.
#pragma once

#include "daemon/rpc/admin.h"
#include "daemon/rpc/devices.h"

namespace kvq {

// The bootstrap capability of the peer `process`. The references outlive it.
wire::Node::Client make_node(const Devices& devices, const AdminParts& admin, std::shared_ptr<Process> process);

}  // namespace kvq

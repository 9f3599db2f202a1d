// The operator's looks at sequences and at the prefix index.
//
// Invariant: a call asks each store once, for at most kMostListed entries; what such a call costs is bounded in
// daemon/store_lists.cc. Neither keys nor tokens are told.
#pragma once

#include "daemon/rpc/devices.h"
#include "kvq/protocol.capnp.h"

namespace kvq {

inline constexpr std::uint32_t kMostListed = 1000;

kj::Promise<void> list_sequences(
    const Devices& devices, capnp::CallContext<wire::Admin::SequencesParams, wire::Admin::SequencesResults> context);
kj::Promise<void> list_prefix(const Devices& devices,
                              capnp::CallContext<wire::Admin::PrefixParams, wire::Admin::PrefixResults> context);

}  // namespace kvq

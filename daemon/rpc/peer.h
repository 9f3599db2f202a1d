// Who is at the other end of a socket, as the kernel says it.
//
// Invariant: a Peer is read once, at accept, from the socket itself; nothing in it comes from the peer's messages. The
// pidfd names the process for good, where its pid number may be used again.
#pragma once

#include <kj/io.h>
#include <sys/types.h>

#include <vector>

#include "daemon/rpc/rpc.h"
#include "kvq/result.h"

namespace kvq {

struct Peer {
  uid_t uid = 0;
  gid_t gid = 0;
  pid_t pid = 0;
  std::vector<gid_t> groups;  // supplementary
  kj::AutoCloseFd pidfd;      // readable once the process is gone

  bool in_group(gid_t group) const;
};

// Error system: the peer is gone already or the kernel refused.
Result<Peer> identify_peer(int socket_fd);

// Root, a listed user, or a member of the admin group by primary or supplementary gid.
bool may_administer(const Peer& peer, const RpcOptions& options);

// Picks a peer's tenant by the rules, and makes tenants for unlisted uids where that is allowed.
class TenantChooser {
 public:
  TenantChooser(Store& store, const RpcOptions& options) : store_(store), options_(options) {}

  // Error permission_denied: no rule names the peer and unlisted uids are not served; limit_reached: too many uids.
  Result<TenantId> choose(const Peer& peer);

 private:
  Store& store_;
  const RpcOptions& options_;
  std::uint32_t made_ = 0;
};

}  // namespace kvq

// Peer credentials: SO_PEERCRED, SO_PEERGROUPS and a pidfd. The kernel fixed all of them when the peer connected.
#include "daemon/rpc/peer.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace kvq {
namespace {

// Each made tenant costs a directory and a prefix table.
constexpr std::uint32_t kMaxMadeTenants = 64;

Result<std::vector<gid_t>> supplementary_groups(int socket_fd) {
  std::vector<gid_t> groups(64);
  socklen_t bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  int status = ::getsockopt(socket_fd, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  if (status < 0 && errno == ERANGE) {  // `bytes` now says how much is needed
    groups.resize(bytes / sizeof(gid_t));
    status = ::getsockopt(socket_fd, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes);
  }
  if (status < 0) {
    if (errno == ENODATA) return std::vector<gid_t>{};
    return Error{Errc::system, errno, "cannot read the peer's groups"};
  }
  groups.resize(bytes / sizeof(gid_t));
  return groups;
}

// The peer's process. SO_PEERPIDFD has no race; pidfd_open by number, for older kernels, has one as long as accept.
Result<int> open_pidfd(int socket_fd, pid_t pid) {
  int pidfd = -1;
  socklen_t bytes = sizeof(pidfd);
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) == 0) return pidfd;
  if (errno != ENOPROTOOPT) return Error{Errc::system, errno, "the peer's process is gone"};
  pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (pidfd < 0) return Error{Errc::system, errno, "the peer's process cannot be watched"};
  return pidfd;
}

}  // namespace

bool Peer::in_group(gid_t group) const {
  return gid == group || std::find(groups.begin(), groups.end(), group) != groups.end();
}

Result<Peer> identify_peer(int socket_fd) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) < 0) {
    return Error{Errc::system, errno, "cannot read the peer's credentials"};
  }
  auto groups = supplementary_groups(socket_fd);
  if (!groups) return groups.error();
  auto pidfd = open_pidfd(socket_fd, credentials.pid);
  if (!pidfd) return pidfd.error();
  return Peer{credentials.uid, credentials.gid, credentials.pid, std::move(*groups), kj::AutoCloseFd(*pidfd)};
}

bool may_administer(const Peer& peer, const RpcOptions& options) {
  const auto& uids = options.admin_uids;
  return peer.uid == 0 || std::find(uids.begin(), uids.end(), peer.uid) != uids.end() ||
         (options.admin_gid && peer.in_group(*options.admin_gid));
}

Result<TenantId> TenantChooser::choose(const Peer& peer) {
  for (const TenantRule& rule : options_.rules) {
    if (std::find(rule.uids.begin(), rule.uids.end(), peer.uid) != rule.uids.end()) return rule.tenant;
  }
  for (const TenantRule& rule : options_.rules) {
    for (gid_t gid : rule.gids) {
      if (peer.in_group(gid)) return rule.tenant;
    }
  }
  if (!options_.unlisted) return Error{Errc::permission_denied, 0, "no tenant of the configuration names this user"};
  TenantSpec spec = *options_.unlisted;
  spec.name = "uid-" + std::to_string(peer.uid);
  if (auto known = store_.find_tenant(spec.name)) return *known;
  if (made_ >= kMaxMadeTenants) return Error{Errc::limit_reached, 0, "too many users without a tenant of their own"};
  try {
    spec.salt = options_.make_salt();
    const TenantId made = store_.add_tenant(spec);
    ++made_;
    return made;
  } catch (const std::exception&) {  // what ends kvqd at start-up is only this peer's problem later
    return Error{Errc::system, errno, "no memory for the user's own tenant"};
  }
}

}  // namespace kvq

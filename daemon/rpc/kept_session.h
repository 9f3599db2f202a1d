// What the holder keeps of a session beside its segment: the pidfd of its process and its two eventfds.
//
// Invariant: a descriptor that came back is used only after the kernel has said that it is what its name says: a pidfd
// of the recorded process, or an eventfd.
#pragma once

#include <sys/types.h>

#include <string>

#include "daemon/store.h"

namespace kvq {

struct KeptSession {
  Descriptor pidfd, doorbell, notice;  // -1: missing, or something else
  std::string problem;                 // names what is missing or wrong; empty: all are right
};

KeptSession take_kept(Kept& kept, const AdoptedSession& record);

void keep_session(Keeper& keeper, SessionId id, pid_t pid, int pidfd, int doorbell, int notice);
void forget_session(Keeper& keeper, SessionId id);

// Drops what is left in `kept` of sessions that no record names.
void forget_strangers(Kept& kept, Keeper* keeper);

// Whether both name one process that has not ended. Pid numbers are used again, so a pidfd that is readable says no.
bool same_living_process(int kept_pidfd, pid_t kept_pid, int peer_pidfd, pid_t peer_pid);
bool has_ended(int pidfd);

}  // namespace kvq

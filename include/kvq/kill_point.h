// Kill points: the places of the protocol where a process may die in tests, named in this one list.
//
// Invariant: a point changes nothing; in builds without KVQ_KILL_POINTS it is no code at all. tests/multiprocess kills a
// daemon or a client at each of them, and fails when one is never reached.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvq {

#define KVQ_EACH_KILL_POINT(POINT)                                                                                     \
  /* daemon: commands, credits, seals */                                                                               \
  POINT(command_applied)     /* changed, not committed: the next daemon undoes it */                                   \
  POINT(command_committed)   /* committed, the ring not yet advanced */                                                \
  POINT(credit_committed)    /* a page is the session's, the magazine does not show it yet */                          \
  POINT(seal_committed)      /* sealed, its entry not yet published by this daemon */                                  \
  POINT(attach_committed)    /* a sequence holds a prefix, the reply is not sent */                                    \
  /* daemon: transcodes, limbo, drops */                                                                               \
  POINT(transcode_started)   /* the destination is taken, the job not submitted */                                     \
  POINT(transcode_submitted) /* workers write the destination */                                                       \
  POINT(transcode_published) /* the new entry is out, the move not committed */                                        \
  POINT(transcode_committed) /* moved, the old slot in limbo */                                                        \
  POINT(page_retired)        /* in limbo with its slot, not committed */                                               \
  POINT(epoch_advanced)                                                                                                \
  POINT(slot_reaped)         /* free again, not committed */                                                           \
  POINT(page_dropped)                                                                                                  \
  POINT(page_quarantined)    /* marked lost, its sessions not told */                                                  \
  /* daemon: slabs and sessions */                                                                                     \
  POINT(slab_made)           /* memory exists, the holder does not have it */                                          \
  POINT(slab_kept)           /* the holder has it, no record names it */                                               \
  POINT(slab_recorded)                                                                                                 \
  POINT(slab_forgotten)      /* no record names it, the holder still has it */                                         \
  POINT(session_kept)        /* the holder has its descriptors, no record names it */                                  \
  POINT(session_recorded)    /* exists, the reply is not sent */                                                       \
  POINT(sequence_ended)      /* of a session that ends: some are left */                                               \
  POINT(session_ended)                                                                                                 \
  /* daemon: adoption */                                                                                               \
  POINT(adopt_undone)        /* the open transaction is taken back */                                                  \
  POINT(adopt_checked)       /* everything is read and checked, nothing changed */                                     \
  POINT(adopt_published)     /* entries and ring words are written anew */                                             \
  POINT(resume_accepted)     /* a client proved who it is, the reply is not sent */                                    \
  /* client */                                                                                                         \
  POINT(client_credit_popped)                                                                                          \
  POINT(client_command_written) /* in the ring, not yet produced */                                                    \
  POINT(client_command_pushed)                                                                                         \
  POINT(client_step_begun)                                                                                             \
  POINT(client_page_written)    /* K and V are in an open page, the step still open */                                 \
  POINT(client_step_ended)                                                                                             \
  POINT(client_registered)      /* the daemon knows the session, the client maps nothing yet */                        \
  POINT(client_slab_mapped)     /* mapped, not acknowledged */                                                         \
  POINT(client_attached)        /* the daemon's reply is there */                                                      \
  POINT(client_reconnected)     /* the socket is new, no session resumed */                                            \
  POINT(client_resumed)

enum class KillPoint : std::uint8_t {
#define KVQ_KILL_POINT_NAME(name) name,
  KVQ_EACH_KILL_POINT(KVQ_KILL_POINT_NAME)
#undef KVQ_KILL_POINT_NAME
};

#if defined(KVQ_KILL_POINTS)
// Set by tests before other threads run; called at each point.
inline std::atomic<void (*)(KillPoint)> kill_point_hook{nullptr};
inline void kill_point(KillPoint point) {
  if (auto* hook = kill_point_hook.load(std::memory_order_relaxed); hook != nullptr) hook(point);
}
#else
inline void kill_point(KillPoint) {}
#endif

inline const char* name(KillPoint point) {
  constexpr const char* kNames[] = {
#define KVQ_KILL_POINT_NAME(name) #name,
      KVQ_EACH_KILL_POINT(KVQ_KILL_POINT_NAME)
#undef KVQ_KILL_POINT_NAME
  };
  return kNames[static_cast<std::size_t>(point)];
}

#define KVQ_KILL_POINT_ONE(name) +1
inline constexpr std::size_t kKillPoints = 0 KVQ_EACH_KILL_POINT(KVQ_KILL_POINT_ONE);
#undef KVQ_KILL_POINT_ONE

}  // namespace kvq

// A small kvqd for tests of the client: the real schema over a real socket, memory that outlives each of its "deaths",
// and a script of what to do wrong.
//
// Invariant: state changes on the loop thread only. crash() leaves memory, sessions and sequences as they are and
// breaks every socket without a word, as SIGKILL does; start() is the next daemon over the same files, which resumes
// sessions that the dead one left and nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/loop_thread.h"
#include "kvq/result.h"

namespace kvq::test {

// A GPU's memory in place of the host's: one slab that holds all pages, and the directory's mirror. All of it is the
// test's.
struct FakeGpu {
  std::string uuid;
  std::uint64_t slab_bytes = 0, mirror_bytes = 0;
  int slab_fd = -1, mirror_fd = -1;
  bool writable = true;
  std::function<void(std::uint32_t page, std::uint64_t entry)> publish;  // to the mirror; on the daemon's thread
};

class FakeDaemon {
 public:
  // What it does from now on. Calls go by their names in protocol.capnp; a resume of a session is "reconnect".
  struct Script {
    std::string break_at;               // dies in this call, once ...
    bool break_after = false;           // ... after it has done what was asked
    std::uint32_t back_after_ms = 20;   // and comes back so long afterwards; 0: it does not
    std::string hold;                   // does not answer this call, once
    Errc refuse = Errc::ok;             // of a reconnect
    std::string device = "host", uuid;  // in the answer to a registration
    bool other_instance = false, other_session = false, other_tenant = false;  // in the answer to a reconnect
  };
  struct Seen {
    std::map<std::string, std::uint32_t> calls;  // begun, by name
    std::uint32_t resumed = 0;                   // reconnects with the right token
    std::uint32_t wrong_tokens = 0;
    std::uint32_t attach_repeats = 0;  // of a sequence that had been attached so
    std::uint32_t sessions = 0;        // that exist
    std::uint32_t sequences = 0;       // of them
    std::uint32_t connections = 0;     // ever accepted
  };

  explicit FakeDaemon(const FakeGpu* gpu = nullptr);
  ~FakeDaemon();
  FakeDaemon(const FakeDaemon&) = delete;
  FakeDaemon& operator=(const FakeDaemon&) = delete;

  const std::string& socket() const { return socket_; }
  void crash();
  void start();
  // Breaks every socket and goes on: the sessions end.
  void cut();
  // Announces one more slab to every session; returns once they have mapped it.
  void add_slab();
  void set(const Script& script);
  Seen seen();

  struct State;

 private:
  template <typename Body>
  void on_loop(Body body);

  std::string directory_, socket_;
  client::LoopThread loop_;
  std::unique_ptr<State> state_;  // loop thread only
};

}  // namespace kvq::test

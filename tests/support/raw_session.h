// A session spoken by hand on the wire, for what libkvq would never do: looking at descriptors, lying about versions,
// claiming what is another's, answering nothing, and the operator's calls.
//
// Invariant: every call blocks the test's thread until the daemon answered; descriptors that were received stay open
// here.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "client/loop_thread.h"
#include "kvq/types.h"

namespace kvq::test {

class RawSession {
 public:
  struct Slab {
    int fd = -1;
    bool writable = false;
  };

  // `answers` false: it never acknowledges a slab.
  explicit RawSession(const std::string& socket, bool answers = true);
  ~RawSession();

  // Registers the tiny model; returns the status code (Errc). The message goes to `message`.
  int register_model(std::uint32_t contract_version, std::string* message);
  // Asks for another's session. The daemon's answer as in register_model; -1: it hung up.
  int resume_session(std::uint32_t session, const std::array<std::uint8_t, 16>& token, std::string* message = nullptr);
  // A credits call, and one that attaches `page`; -1: the daemon hung up.
  int credits(std::uint32_t pages, std::uint32_t deadline_ms);
  int attach(std::uint32_t sequence, std::uint32_t page, std::uint16_t generation, std::uint32_t pages,
             const std::array<std::uint8_t, 32>& key);
  // Descriptors by name: directory, prefixTable, segment, doorbell, notice; -1: the daemon hung up.
  int descriptor(const std::string& name);
  std::map<std::uint32_t, Slab> slabs();

  // As root: quantizes every page that is idle; returns the JSON reply.
  std::string quantize();
  void set(const std::string& key, const std::string& value);
  void resize(std::uint64_t arena_bytes);
  std::string status();
  void verify();  // every sealed page; returns when all are compared

 private:
  struct Wire;
  int do_register(std::uint32_t contract_version, std::uint32_t resume, const std::uint8_t* token,
                  std::string* message);
  const bool answers_;
  client::LoopThread loop_;
  std::unique_ptr<Wire> wire_;  // loop thread only
};

}  // namespace kvq::test

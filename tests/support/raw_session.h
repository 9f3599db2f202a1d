// A session spoken by hand on the wire, for what libkvq would never do: looking at descriptors, lying about versions,
// and the operator's calls.
//
// Invariant: every call blocks the test's thread until the daemon answered; descriptors that were received stay open
// here.
#pragma once

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

  explicit RawSession(const std::string& socket);
  ~RawSession();

  // Registers the tiny model; returns the status code (Errc). The message goes to `message`.
  int register_model(std::uint32_t contract_version, std::string* message);
  // Descriptors by name: directory, prefixTable, segment, and the slabs pushed so far.
  int descriptor(const std::string& name);
  std::map<std::uint32_t, Slab> slabs();

  // As root: quantizes every page that is idle; returns the JSON reply.
  std::string quantize();
  void set(const std::string& key, const std::string& value);
  std::string status();

 private:
  struct Wire;
  client::LoopThread loop_;
  std::unique_ptr<Wire> wire_;  // loop thread only
};

}  // namespace kvq::test

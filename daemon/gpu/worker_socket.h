// The socket between kvqd and its GPU worker, as both sides use it: whole messages, each with at most one descriptor.
//
// Invariant: nothing waits. What the kernel does not take yet is queued here in order, with a descriptor of its own,
// and flush() goes on with it. Once the other end is gone, sending does nothing.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "daemon/gpu/worker_protocol.h"
#include "daemon/shm/descriptor.h"

namespace kvq::gpu {

struct Packet {
  Message message;
  std::vector<std::byte> more;  // Hello or Model
  Descriptor file;

  // The structure that follows the message; false when it is of another size.
  template <typename T>
  bool read_more(T& out) const {
    if (more.size() != sizeof(T)) return false;
    __builtin_memcpy(&out, more.data(), sizeof(T));
    return true;
  }
};

class WorkerSocket {
 public:
  enum class Got { message, nothing, end };

  WorkerSocket() = default;
  explicit WorkerSocket(Descriptor socket) : socket_(std::move(socket)) {}

  int get() const { return socket_.get(); }
  // `file` stays the caller's; -1: none.
  void send(const Message& message, int file = -1, std::span<const std::byte> more = {});
  void flush();
  bool all_sent() const { return queue_.empty(); }
  Got receive(Packet& packet);

 private:
  bool send_now(const Message& message, int file, std::span<const std::byte> more);

  Descriptor socket_;
  std::deque<Packet> queue_;
  bool broken_ = false;
};

// `text` cut to what a message holds.
void set_text(Message& message, const char* text);

}  // namespace kvq::gpu

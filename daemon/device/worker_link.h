// One worker and the line to it: its process, the socket, the rings, the bells, and one descriptor that tells when any
// of them has something to say.
//
// Invariant: a link belongs to one worker; the next worker gets a new one, with rings of its own, so that nothing an
// earlier one wrote is ever taken for an answer of this. Nothing waits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "daemon/device/worker_process.h"
#include "daemon/gpu/worker_socket.h"
#include "daemon/shm/memfd.h"

namespace kvq {

class WorkerLink {
 public:
  static Result<WorkerLink> start(const std::vector<std::string>& command);

  WorkerLink() = default;
  WorkerLink(WorkerLink&&) noexcept = default;
  WorkerLink& operator=(WorkerLink&&) noexcept = default;

  bool exists() const { return process_.pidfd() >= 0; }
  WorkerProcess& process() { return process_; }
  gpu::WorkerSocket& socket() { return socket_; }

  // Adds what must be watched to an epoll set (edge-triggered); closing the link takes it out again.
  bool watch(int epoll) const;
  void read_bell() const;

  // False: the ring is full, or a message is still on its way and must come first.
  bool push_job(const gpu::Job& job);
  bool push_entry(const gpu::EntryWrite& write);
  bool pop_done(gpu::JobDone& done);
  void set_urgent(bool urgent);
  // Rings the worker if it may sleep; after pushing.
  void ring();

  std::uint64_t written() const { return rings().written.load(std::memory_order_acquire); }
  std::uint64_t beats() const { return rings().beats.load(std::memory_order_relaxed); }

 private:
  gpu::WorkerRings& rings() const { return *reinterpret_cast<gpu::WorkerRings*>(memory_.data()); }

  Memfd memory_;
  Descriptor worker_bell_, daemon_bell_;
  gpu::WorkerSocket socket_;
  bool bell_ = false;
  WorkerProcess process_;
};

}  // namespace kvq

// Makes both ends, gives the worker its own, and keeps kvqd's.
#include "daemon/device/worker_link.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>

namespace kvq {
namespace {

bool watch_one(int epoll, int fd, std::uint32_t events) {
  epoll_event event{};
  event.events = events | EPOLLET;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

Result<WorkerLink> WorkerLink::start(const std::vector<std::string>& command) {
  WorkerLink link;
  Result<Memfd> memory = Memfd::create("kvq-worker-rings", sizeof(gpu::WorkerRings));
  if (!memory) return memory.error();
  link.memory_ = std::move(*memory);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return Error{Errc::system, errno, "a socket pair for the GPU worker"};
  }
  const Descriptor worker_end(ends[1]);
  link.socket_ = gpu::WorkerSocket(Descriptor(ends[0]));
  link.worker_bell_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  link.daemon_bell_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (link.worker_bell_.get() < 0 || link.daemon_bell_.get() < 0) {
    return Error{Errc::system, errno, "an eventfd for the GPU worker"};
  }
  Result<WorkerProcess> process = WorkerProcess::start(
      command, {worker_end.get(), link.memory_.descriptor(), link.worker_bell_.get(), link.daemon_bell_.get()});
  if (!process) return process.error();
  link.process_ = std::move(*process);
  return link;
}

bool WorkerLink::watch(int epoll) const {
  return watch_one(epoll, daemon_bell_.get(), EPOLLIN) && watch_one(epoll, socket_.get(), EPOLLIN | EPOLLOUT) &&
         watch_one(epoll, process_.pidfd(), EPOLLIN);
}

void WorkerLink::read_bell() const {
  std::uint64_t rings = 0;
  [[maybe_unused]] const ssize_t got = ::read(daemon_bell_.get(), &rings, sizeof(rings));
}

bool WorkerLink::push_job(const gpu::Job& job) { return socket_.all_sent() && gpu::push(rings().jobs, job, bell_); }

bool WorkerLink::push_entry(const gpu::EntryWrite& write) {
  return socket_.all_sent() && gpu::push(rings().entries, write, bell_);
}

bool WorkerLink::pop_done(gpu::JobDone& done) {
  auto& ring = rings().done;
  const std::uint64_t at = ring.consumed.load(std::memory_order_relaxed);
  if (at == ring.produced.load(std::memory_order_seq_cst)) return false;
  done = ring.slot[at % std::size(ring.slot)];
  ring.consumed.store(at + 1, std::memory_order_seq_cst);
  return true;
}

void WorkerLink::set_urgent(bool urgent) {
  const bool was = rings().urgent.exchange(urgent ? 1 : 0, std::memory_order_seq_cst) != 0;
  bell_ = bell_ || (urgent && !was);
}

void WorkerLink::ring() {
  if (!bell_) return;
  bell_ = false;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t rung = ::write(worker_bell_.get(), &one, sizeof(one));
}

}  // namespace kvq

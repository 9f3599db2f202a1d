// The worker's loop: messages, then the rings, then what the device has finished.
//
// Invariant: rings are read in the order that worker_protocol.h states, so a job never comes before its slab or model,
// nor an entry before its mirror. Each round adds a beat and does a bounded piece of work, whatever kvqd asks for; the
// worker sleeps for at most 50 ms and ends when its socket does.
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <set>
#include <vector>

#include "daemon/gpu/backend.h"
#include "daemon/gpu/worker_socket.h"

namespace kvq::gpu {
namespace {

constexpr std::chrono::nanoseconds kIdle = std::chrono::milliseconds(50), kWriting = std::chrono::microseconds(100);
constexpr std::size_t kMessagesPerRound = 16, kEntriesPerRound = 4096;

class Worker {
 public:
  Worker(Backend& backend, WorkerRings& rings) : backend_(backend), rings_(rings), socket_(Descriptor(kSocketFd)) {}

  int run() {
    Message hello{.kind = MessageKind::hello};
    const Hello what = backend_.hello();
    socket_.send(hello, -1, std::as_bytes(std::span(&what, 1)));
    while (!ended_ && !failed_) {
      rings_.beats.fetch_add(1, std::memory_order_relaxed);
      const bool moved = round();
      if (told_) ring_daemon();
      if (!moved) sleep_until_rung();
    }
    return failed_ ? 1 : 0;
  }

 private:
  // False: nothing to do before somebody rings or the device goes on.
  bool round() {
    const std::uint64_t jobs = rings_.jobs.produced.load(std::memory_order_seq_cst);
    const std::uint64_t entries = rings_.entries.produced.load(std::memory_order_seq_cst);
    const bool all_read = read_messages();
    bool moved = make_a_spare() || !all_read;
    if (failed_ || ended_) return true;
    if (all_read) {
      moved = take_entries(entries) || moved;
      moved = take_jobs(jobs) || moved;
    }
    if (!failed_) moved = finish_jobs() || moved;
    if (!failed_) moved = show_written() || moved;
    socket_.flush();
    return moved;
  }

  bool read_messages() {
    for (std::size_t i = 0; i < kMessagesPerRound && !failed_; ++i) {
      Packet packet;
      switch (socket_.receive(packet)) {
        case WorkerSocket::Got::nothing:
          return true;
        case WorkerSocket::Got::end:
          ended_ = true;
          return true;
        case WorkerSocket::Got::message:
          handle(packet);
      }
    }
    return false;
  }

  void handle(Packet& packet) {
    const Message& m = packet.message;
    switch (m.kind) {
      case MessageKind::begin:
        slab_bytes_ = m.bytes;
        placed_.assign(m.count, false);
        if (const Result<void> done = backend_.reserve(m.bytes, m.count); !done) fail(done.error());
        return;
      case MessageKind::fill:
        wanted_spares_ += m.count;
        filling_ = true;
        return;
      case MessageKind::adopt:
        return answer(m, place(m, backend_.adopt_slab(SlabId{m.index}, m.serial, std::move(packet.file))));
      case MessageKind::place:
        if (const Result<void> done = place(m, backend_.place_slab(SlabId{m.index}, m.serial)); !done) answer(m, done);
        return;
      case MessageKind::release:
        wanted_spares_ += m.count;
        filling_ = filling_ || m.count > 0;
        if (!is_placed(m.index)) return;
        placed_[m.index] = false;
        backend_.release_slab(SlabId{m.index});
        return;
      case MessageKind::mirror:
        return make_mirror(m);
      case MessageKind::adopt_mirror: {
        const Result<void> done = backend_.adopt_mirror(TenantId{m.index}, m.count, std::move(packet.file));
        if (done) mirrors_.insert(m.index);
        return answer(m, done);
      }
      case MessageKind::model:
        if (Model model; packet.read_more(model)) backend_.add_model(m.index, model.geometry);
        return;
      default:
        return fail({Errc::version_mismatch, static_cast<int>(m.kind), "a message of another release of kvqd"});
    }
  }

  Result<void> place(const Message& m, Result<void> done) {
    if (done && m.index < placed_.size()) placed_[m.index] = true;
    return done;
  }
  bool is_placed(std::uint64_t slab) const { return slab < placed_.size() && placed_[slab]; }

  void make_mirror(const Message& m) {
    Result<Descriptor> file = backend_.make_mirror(TenantId{m.index}, m.count);
    if (!file) return answer(m, file.error());
    mirrors_.insert(m.index);
    send({.kind = MessageKind::mirror_made, .index = m.index, .count = m.count}, file->get());
  }

  // One a round, so that jobs and beats go on meanwhile.
  bool make_a_spare() {
    if (!socket_.all_sent() || failed_) return false;
    if (wanted_spares_ == 0) {
      if (filling_) send({.kind = MessageKind::ready, .count = made_spares_});
      filling_ = false;
      made_spares_ = 0;
      return false;
    }
    Result<NewMemory> memory = backend_.make_slab();
    if (!memory) {
      Message ready{.kind = MessageKind::ready,
                    .count = made_spares_,
                    .code = memory.error().code,
                    .native = memory.error().native};
      set_text(ready, memory.error().context);
      send(ready);
      filling_ = false;
      made_spares_ = wanted_spares_ = 0;
      if (memory.error().code == Errc::context_lost) fail(memory.error());
      return true;
    }
    --wanted_spares_;
    ++made_spares_;
    send({.kind = MessageKind::spare, .index = memory->index, .serial = memory->serial, .bytes = slab_bytes_},
         memory->exported.get());
    return true;
  }

  // What names a mirror that is not here has no reader.
  bool take_entries(std::uint64_t produced) {
    auto& ring = rings_.entries;
    std::uint64_t at = ring.consumed.load(std::memory_order_relaxed);
    if (at == produced) return false;
    const std::uint64_t end = std::min<std::uint64_t>(produced, at + kEntriesPerRound);
    writes_.clear();
    for (; at != end; ++at) {
      const EntryWrite& write = ring.slot[at % std::size(ring.slot)];
      consumed_sequence_ = write.sequence;
      if (mirrors_.contains(write.tenant)) writes_.push_back(write);
    }
    if (!writes_.empty()) {
      if (const Result<void> done = backend_.write_entries(writes_); !done) fail(done.error());
      forwarded_sequence_ = writes_.back().sequence;
    }
    ring.consumed.store(end, std::memory_order_seq_cst);
    told_ = true;
    return true;
  }

  bool take_jobs(std::uint64_t produced) {
    auto& ring = rings_.jobs;
    std::uint64_t at = ring.consumed.load(std::memory_order_relaxed);
    if (at == produced) return false;
    jobs_.clear();
    for (; at != produced; ++at) {
      const Job& job = ring.slot[at % std::size(ring.slot)];
      const bool here = is_placed(job.source_bytes / slab_bytes_) &&
                        (job.to == Format::none || is_placed(job.destination_bytes / slab_bytes_));
      if (here) {
        jobs_.push_back(job);
      } else {
        finish({.id = job.id, .code = Errc::system});
      }
    }
    if (!jobs_.empty()) {
      if (const Result<void> done = backend_.submit(jobs_); !done) {
        if (done.error().code == Errc::context_lost) fail(done.error());
        for (const Job& job : jobs_) finish({.id = job.id, .code = done.error().code, .native = done.error().native});
      }
    }
    ring.consumed.store(produced, std::memory_order_seq_cst);
    return true;
  }

  bool finish_jobs() {
    done_.clear();
    backend_.set_urgent(rings_.urgent.load(std::memory_order_seq_cst) != 0);
    const Result<bool> busy = backend_.poll(done_);
    for (const JobDone& done : done_) finish(done);
    if (!busy) fail(busy.error());
    busy_ = busy && *busy;
    return !done_.empty();
  }
  void finish(const JobDone& done) {
    KVQ_ASSERT(push(rings_.done, done, told_));
    told_ = true;
  }

  bool show_written() {
    const std::uint64_t seen = backend_.written();
    const std::uint64_t written = seen >= forwarded_sequence_ ? consumed_sequence_ : seen;
    writing_ = written != consumed_sequence_;
    if (written == rings_.written.load(std::memory_order_relaxed)) return false;
    rings_.written.store(written, std::memory_order_release);
    told_ = true;
    return true;
  }

  void answer(const Message& asked, const Result<void>& done) {
    Message m{.kind = done ? MessageKind::adopted : MessageKind::failed,
              .index = asked.index,
              .count = static_cast<std::uint32_t>(asked.kind),
              .code = done.error().code,
              .native = done.error().native};
    set_text(m, done.error().context);
    send(m);
    if (done.error().code == Errc::context_lost) fail(done.error());
  }
  void fail(const Error& error) {
    if (failed_) return;
    failed_ = true;
    Message m{.kind = MessageKind::failed, .index = kDeviceItself, .code = error.code, .native = error.native};
    set_text(m, error.context);
    send(m);
  }
  void send(const Message& message, int file = -1) {
    socket_.send(message, file);
    told_ = true;
  }

  void ring_daemon() {
    told_ = false;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t rung = ::write(kDaemonBellFd, &one, sizeof(one));  // fails when it is rung already
  }
  void sleep_until_rung() {
    const short out = socket_.all_sent() ? 0 : POLLOUT;
    pollfd wanted[2] = {{kSocketFd, static_cast<short>(POLLIN | out), 0}, {kWorkerBellFd, POLLIN, 0}};
    std::chrono::nanoseconds rest = busy_ ? std::min(kIdle, backend_.quiet()) : kIdle;
    if (writing_) rest = std::min(rest, kWriting);
    const timespec longest{0, rest.count()};
    if (::ppoll(wanted, 2, &longest, nullptr) > 0 && wanted[1].revents != 0) {
      std::uint64_t rings = 0;
      [[maybe_unused]] const ssize_t got = ::read(kWorkerBellFd, &rings, sizeof(rings));
    }
  }

  Backend& backend_;
  WorkerRings& rings_;
  WorkerSocket socket_;
  std::uint64_t slab_bytes_ = 1;
  std::vector<bool> placed_;         // by slab
  std::set<std::uint32_t> mirrors_;  // by tenant
  std::uint32_t wanted_spares_ = 0, made_spares_ = 0;
  bool filling_ = false;  // a `ready` is owed
  std::uint64_t consumed_sequence_ = 0, forwarded_sequence_ = 0;
  std::vector<EntryWrite> writes_;  // kept for their capacity, as the next two
  std::vector<Job> jobs_;
  std::vector<JobDone> done_;
  bool busy_ = false, writing_ = false, told_ = false, ended_ = false, failed_ = false;
};

WorkerRings* map_rings() {
  void* p = ::mmap(nullptr, sizeof(WorkerRings), PROT_READ | PROT_WRITE, MAP_SHARED, kRingsFd, 0);
  return p == MAP_FAILED ? nullptr : static_cast<WorkerRings*>(p);
}

}  // namespace

int run_worker(std::unique_ptr<Backend> backend) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  WorkerRings* rings = map_rings();
  if (rings == nullptr) return refuse_worker("the rings' memory file cannot be mapped");
  return Worker(*backend, *rings).run();
}

int refuse_worker(const std::string& why_not) {
  WorkerSocket socket{Descriptor(kSocketFd)};
  Message m{.kind = MessageKind::failed, .index = kDeviceItself, .code = Errc::system};
  set_text(m, why_not.c_str());
  socket.send(m);
  return 1;
}

}  // namespace kvq::gpu

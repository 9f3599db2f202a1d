// The device while the loop runs: what the store asks for, and the life of workers.
#include "daemon/device/worker_device.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/device/worker_device_state.h"

namespace kvq {
namespace {

constexpr std::uint64_t kLookMs = 20;              // while no worker serves
constexpr std::size_t kMessagesPerAdvance = 1024;  // bound of one call
constexpr std::uint32_t kAdoptMs = 10'000;         // longest that adopting one slab may take at start-up

std::string told(const gpu::Message& m) {
  std::string text = m.text;
  if (m.native != 0) text += " (driver code " + std::to_string(m.native) + ")";
  return text;
}

}  // namespace

// Descriptors fail only where kvqd could not run at all.
WorkerDevice::WorkerDevice(WorkerOptions options)
    : options_(std::move(options)),
      watch_(options_.deadline_ms, options_.first_pause_ms, options_.longest_pause_ms),
      wake_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  KVQ_ASSERT(wake_.get() >= 0 && timer_.get() >= 0);
  KVQ_ASSERT(::epoll_ctl(wake_.get(), EPOLL_CTL_ADD, timer_.get(), &event) == 0);
}

WorkerDevice::~WorkerDevice() = default;

// --- slabs ---

Result<void> WorkerDevice::create_slab(SlabId slab) {
  if (!works()) return Error{Errc::no_memory, 0, "the GPU worker is being started"};
  const Result<void> created = slabs_.create(link_, slab);
  if (!created) fill();
  return created;
}

Result<void> WorkerDevice::adopt_slab(SlabId slab, Descriptor& file, std::uint64_t serial) {
  KVQ_ASSERT(!looped_);  // a next daemon adopts before its loop runs
  if (!works()) return Error{Errc::system, 0, "the GPU worker has ended"};
  if (const Result<void> sent = slabs_.adopt(link_, slab, file, serial); !sent) return sent;
  const auto& s = slabs_.slab(slab);
  await([&s] { return s.in_place || !s.problem.empty(); }, kAdoptMs);
  // Without room to map it now the worker does without it, as one that is started later may. Any other answer, or none,
  // leaves open whether it is this GPU's memory at all.
  if (s.in_place || s.refusal == Errc::no_memory) return {};
  options_.log("event=gpu_slab_refused slab=" + std::to_string(raw(slab)) + " why=\"" + s.problem + cause_ + "\"");
  return Error{Errc::system, 0, "the GPU worker could not import it"};
}

void WorkerDevice::destroy_slab(SlabId slab) { slabs_.destroy(works() ? &link_ : nullptr, slab); }

int WorkerDevice::descriptor(SlabId slab, bool writable) const {
  const SlabBook::Slab& s = slabs_.slab(slab);
  return writable || s.reader.get() < 0 ? s.file.get() : s.reader.get();
}

void WorkerDevice::fill() {
  if (filling_ || slabs_.missing() == 0) return;
  filling_ = true;
  link_.socket().send({.kind = gpu::MessageKind::fill, .count = slabs_.missing()});
}

// What the GPU has no room for now is asked for again when a slab is needed.
void WorkerDevice::resize(std::uint64_t bytes) {
  slabs_.set_limit(static_cast<std::uint32_t>(bytes / slabs_.slab_bytes()));
  if (!works() || !looped_) return;  // a next worker is asked for all of it; so is the first, when the loop begins
  give_surplus();
  fill();
}

void WorkerDevice::give_surplus() {
  while (works() && slabs_.surplus() > 0) slabs_.drop_spare(link_);
}

void WorkerDevice::add_mirror(TenantId tenant, const DirectoryEntry* entries, std::uint32_t capacity,
                              Descriptor adopted) {
  mirrors_.add(tenant, entries, capacity, std::move(adopted));
}

void WorkerDevice::publish(TenantId tenant, PageId page, std::uint64_t entry) {
  mirrors_.publish(works() ? &link_ : nullptr, tenant, page, entry);
  if (works()) link_.ring();
}

// --- jobs ---

// A next worker hears of it at the store's next tick.
void WorkerDevice::set_urgent(bool urgent) {
  if (!works()) return;
  link_.set_urgent(urgent);
  link_.ring();
}

void WorkerDevice::submit(std::span<const TranscodeJob> jobs) {
  jobs_.submit(jobs);
  if (!works()) return;
  jobs_.send(link_);
  link_.ring();
}

void WorkerDevice::poll(std::vector<TranscodeDone>& done) {
  if (works()) {
    jobs_.receive(link_);
    jobs_.send(link_);
    link_.ring();
  }
  jobs_.take(done);
}

// --- the worker's life ---

void WorkerDevice::advance(std::uint64_t now_ms) {
  const bool first = !std::exchange(looped_, true);
  now_ms_ = now_ms;
  harvest();
  if (first) {
    watch_.started(now_ms);
    arm(watch_.look_ms());
  }
  if (state_ == State::starting || works()) read_messages();
  if (works() && watch_.stuck(now_ms, link_.beats())) {
    end_worker("it stood still for " + std::to_string(options_.deadline_ms) + " ms");
  }
  if (state_ == State::starting && now_ms >= start_by_ms_) {
    end_worker("it did not serve within " + std::to_string(options_.start_ms) + " ms");
  }
  if (state_ != State::waiting && state_ != State::lost) {
    std::string how;
    if (link_.process().ended(how)) {
      if (cause_.empty() || state_ == State::starting) cause_ = "it ended by itself with " + how;
      collect();
    }
  }
  if (state_ == State::waiting && now_ms >= start_at_ms_) start_again();
  if (works()) flow();
}

// All that can move, moves.
void WorkerDevice::flow() {
  link_.read_bell();
  link_.socket().flush();
  if (slabs_.spares() == 0 && shortage_.empty()) fill();  // the first time after adoption
  mirrors_.advance(link_, now_ms_);
  jobs_.receive(link_);
  jobs_.send(link_);
  link_.ring();
}

// From here on the descriptor is quiet until something new happens.
void WorkerDevice::harvest() const {
  epoll_event events[8];
  while (::epoll_wait(wake_.get(), events, 8, 0) == 8) {
  }
  std::uint64_t times = 0;  // the timer goes on only when it is read
  [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &times, sizeof(times));
}

void WorkerDevice::arm(std::uint64_t interval_ms) {
  if (armed_ms_ == interval_ms) return;
  armed_ms_ = interval_ms;
  itimerspec spec{};
  spec.it_value.tv_sec = spec.it_interval.tv_sec = static_cast<time_t>(interval_ms / 1000);
  spec.it_value.tv_nsec = spec.it_interval.tv_nsec = static_cast<long>(interval_ms % 1000) * 1'000'000;
  KVQ_ASSERT(::timerfd_settime(timer_.get(), 0, &spec, nullptr) == 0);
}

void WorkerDevice::read_messages() {
  for (std::size_t i = 0; i < kMessagesPerAdvance; ++i) {
    gpu::Packet packet;
    switch (link_.socket().receive(packet)) {
      case gpu::WorkerSocket::Got::nothing:
        return;
      case gpu::WorkerSocket::Got::end:
        return end_worker("");  // what it said before, or its exit code, tells why
      case gpu::WorkerSocket::Got::message:
        handle(packet);
    }
    if (state_ != State::starting && !works()) return;
  }
}

void WorkerDevice::handle(gpu::Packet& packet) {
  const gpu::Message& m = packet.message;
  switch (m.kind) {
    case gpu::MessageKind::hello:
      if (!packet.read_more(greeting_) || greeting_.protocol != gpu::kWorkerProtocol) {
        return end_worker("it is of another release than kvqd");
      }
      greeted_ = true;
      if (looped_) set_up_again();
      return;
    case gpu::MessageKind::spare:
      slabs_.add_spare(m.index, m.serial, std::move(packet.file));
      return give_surplus();
    case gpu::MessageKind::ready:
      filling_ = false;
      shortage_ = told(m);
      if (m.code == Errc::ok) fill();  // the arena may have grown meanwhile
      // Each of its places is a slab or a spare by and by: it was only asked twice for the same.
      if (is_legacy() && looped_ && m.code == Errc::no_memory) shortage_.clear();
      return;
    case gpu::MessageKind::adopted:
      if (m.count == static_cast<std::uint32_t>(gpu::MessageKind::adopt)) return slabs_.adopted(SlabId{m.index});
      return mirrors_.adopted(TenantId{m.index});
    case gpu::MessageKind::mirror_made:
      return mirrors_.made(TenantId{m.index}, std::move(packet.file));
    case gpu::MessageKind::failed:
      return handle_failed(m);
    default:
      return end_worker("it sent a message that no worker sends");
  }
}

void WorkerDevice::handle_failed(const gpu::Message& m) {
  if (m.index == gpu::kDeviceItself) return end_worker(told(m));
  switch (static_cast<gpu::MessageKind>(m.count)) {
    case gpu::MessageKind::adopt:
    case gpu::MessageKind::place:
      options_.log("event=gpu_slab_refused slab=" + std::to_string(m.index) + " why=\"" + told(m) + "\"");
      return slabs_.refused(SlabId{m.index}, m.code, told(m));
    case gpu::MessageKind::mirror:
      return mirrors_.refused(TenantId{m.index}, told(m), now_ms_);
    default:  // what clients read would stay as it is for ever
      return end_worker("mirror " + std::to_string(m.index) + " could not be adopted: " + told(m));
  }
}

void WorkerDevice::end_worker(std::string cause) {
  if (state_ == State::ending || state_ == State::waiting || state_ == State::lost) return;
  if (!cause.empty()) cause_ = std::move(cause);
  link_.process().kill();
  state_ = State::ending;
  arm(kLookMs);
}

// The process is gone, so nothing is written any more: neither to a job's destination nor to a mirror.
void WorkerDevice::collect() {
  jobs_.receive(link_);
  const std::size_t lost = jobs_.with_worker();
  jobs_.fail_all();
  mirrors_.stop(link_.written());
  slabs_.stop();
  filling_ = false;
  link_ = WorkerLink();
  if (is_legacy()) {
    state_ = State::lost;
    options_.log("event=gpu_pages_lost uuid=" + std::string(hello_.uuid) + " why=\"the GPU worker ended: " + cause_ +
                 "\" jobs_lost=" + std::to_string(lost));
    return options_.pages_lost();
  }
  state_ = State::waiting;
  start_at_ms_ = watch_.next_start_ms(now_ms_);
  arm(kLookMs);
  options_.log("event=gpu_worker_lost why=\"" + cause_ + "\" jobs_lost=" + std::to_string(lost) +
               " next_start_ms=" + std::to_string(start_at_ms_ - now_ms_));
}

void WorkerDevice::start_again() {
  ++restarts_;
  Result<WorkerLink> link = WorkerLink::start(options_.command);
  if (!link || !link->watch(wake_.get())) {
    cause_ = std::string("the next one could not be started: ") + (link ? "epoll" : link.error().context);
    start_at_ms_ = watch_.next_start_ms(now_ms_);
    jobs_.fail_all();
    return;
  }
  link_ = std::move(*link);
  options_.keep_worker(link_.process().pidfd());
  state_ = State::starting;
  start_by_ms_ = now_ms_ + options_.start_ms;
  watch_.started(now_ms_);
}

// Everything that exists, in the protocol's order.
void WorkerDevice::set_up_again() {
  if (std::strcmp(greeting_.uuid, hello_.uuid) != 0 || std::strcmp(greeting_.device, hello_.device) != 0) {
    return end_worker(std::string("the next one found another GPU, ") + greeting_.uuid);
  }
  link_.socket().send({.kind = gpu::MessageKind::begin, .bytes = slabs_.slab_bytes(), .count = slabs_.places()});
  slabs_.restart(link_);
  mirrors_.restart(link_);
  jobs_.restart(link_);
  shortage_.clear();
  state_ = State::working;
  fill();
  arm(watch_.look_ms());
  options_.log("event=gpu_worker_started pid=" + std::to_string(link_.process().pid()) +
               " restarts=" + std::to_string(restarts_) + " after=\"" + std::exchange(cause_, {}) + "\"");
}

DeviceHealth WorkerDevice::health() const {
  DeviceHealth h{.uuid = hello_.uuid,
                 .exporter = gpu::name(hello_.exporter),
                 .restarts = restarts_,
                 .held_bytes = slabs_.held_bytes() + mirrors_.held_bytes(hello_.granularity),
                 .overhead_bytes = hello_.overhead_bytes};
  if (state_ == State::ending) {
    h.text = "the GPU worker is being ended: " + cause_;
  } else if (state_ == State::lost) {
    h.text = "the pages are lost with the GPU worker, which ended: " + cause_;
  } else if (state_ == State::waiting || state_ == State::starting) {
    h.text = "the GPU worker ended: " + cause_ + "; a new one is being started";
  } else if (!mirrors_.caught_up(written())) {
    h.text = "the GPU worker was started anew and writes the mirrors";
  } else if (h.text = slabs_.problem(); h.text.empty()) {
    h.text = mirrors_.problem();
    if (h.text.empty() && !shortage_.empty() && slabs_.missing() > 0) {
      h.text = "the GPU has no room for " + std::to_string(slabs_.missing()) + " of " + std::to_string(slabs_.limit()) +
               " slabs: " + shortage_;
    }
  }
  h.degraded = !h.text.empty();
  return h;
}

}  // namespace kvq

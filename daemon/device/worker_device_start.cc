// Start-up of the worker's device: a worker, what its GPU gives, and an arena of the slabs that fit.
//
// Invariant: before the loop, so it may wait; each wait is bounded and ends when the worker does.
#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "daemon/device/worker_device_state.h"
#include "kvq/directory.h"

namespace kvq {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEndMs = 1000;  // from the end of a worker's socket to its own

std::string shown(std::uint64_t bytes) {
  return std::to_string(bytes) + " bytes (" + std::to_string(bytes >> 20) + " MiB)";
}

}  // namespace

bool WorkerDevice::await(const std::function<bool()>& done, std::uint32_t most_ms) {
  const auto end = Clock::now() + std::chrono::milliseconds(most_ms);
  for (;;) {
    if (state_ == State::starting || works()) read_messages();
    if (works()) link_.socket().flush();
    if (done()) return true;
    std::string how;
    if (state_ == State::ending || link_.process().ended(how)) return false;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    epoll_event events[8];
    ::epoll_wait(wake_.get(), events, 8, static_cast<int>(std::min<long>(left, 100)));
  }
}

bool WorkerDevice::launch(MadeWorkerDevice& made, WorkerLink started) {
  Result<WorkerLink> link = started.exists() ? std::move(started) : WorkerLink::start(options_.command);
  if (!link) {
    made.no_device = true;
    made.why_not = options_.command.front() + " cannot be started: " + std::strerror(link.error().native) +
                   "; install kvqd-gpu, or give its path with --gpu-worker";
    return false;
  }
  link_ = std::move(*link);
  KVQ_ASSERT(link_.watch(wake_.get()));
  options_.keep_worker(link_.process().pidfd());
  if (await([this] { return greeted_; }, options_.start_ms)) return check_hello(made);
  made.no_device = true;
  std::string how;
  if (cause_.empty() && link_.process().pidfd() >= 0) {
    // Its end follows that of its socket.
    cause_ = link_.process().ended(how, kEndMs) ? "it ended with " + how + " before it said what GPU there is"
                                                : "it said nothing for " + std::to_string(options_.start_ms) + " ms";
  }
  made.why_not = options_.command.front() + " finds no GPU to work with: " + cause_;
  return false;
}

bool WorkerDevice::check_hello(MadeWorkerDevice& made) {
  hello_ = greeting_;
  hello_.device[sizeof(hello_.device) - 1] = hello_.uuid[sizeof(hello_.uuid) - 1] =
      hello_.name[sizeof(hello_.name) - 1] = 0;
  made.gpu = hello_.name;
  made.in_mps = hello_.mps != 0;
  if (!options_.uuid.empty() && options_.uuid != hello_.uuid) {
    made.no_device = true;
    made.why_not =
        "GPU " + options_.uuid + " is not here, the worker found " + hello_.uuid + "; nvidia-smi -L lists them";
    return false;
  }
  if (hello_.granularity == 0 || options_.slab_bytes % hello_.granularity != 0) {
    made.why_not = "slab_bytes is " + shown(options_.slab_bytes) + ", this GPU maps multiples of " +
                   shown(hello_.granularity) + "; choose a larger power of two";
    return false;
  }
  return true;
}

bool WorkerDevice::fill_arena(MadeWorkerDevice& made, std::uint32_t asked) {
  fill();
  if (!await([this] { return !filling_; }, options_.start_ms)) {
    made.why_not = "the GPU worker did not make its slabs within " + std::to_string(options_.start_ms) +
                   " ms: " + (cause_.empty() ? std::string("it says nothing") : cause_);
    return false;
  }
  std::uint32_t fit = slabs_.spares();
  // The GPU is full, and the mirrors need room, too. A legacy worker has left some, and would get none back.
  if (fit < asked && fit > options_.least_slabs && !is_legacy()) {
    slabs_.drop_spare(link_);
    --fit;
  }
  if (fit >= asked) return true;
  const std::string numbers = std::to_string(fit) + " of " + std::to_string(asked) + " slabs of " +
                              shown(slabs_.slab_bytes()) + " fit: " + shown(hello_.free_bytes) + " of " +
                              shown(hello_.total_bytes) + " were free on " + hello_.uuid;
  if (fit < options_.least_slabs) {
    made.why_not = numbers + ", and at least " + std::to_string(options_.least_slabs) +
                   " slabs are needed; free GPU memory (nvidia-smi shows who holds it) or lower slab_bytes";
    return false;
  }
  made.warning = numbers + "; kvqd serves these";
  slabs_.set_limit(fit);
  shortage_.clear();
  return true;
}

bool WorkerDevice::start(MadeWorkerDevice& made, WorkerLink started) {
  if (!launch(made, std::move(started))) return false;
  const double share = options_.arena_share * static_cast<double>(hello_.total_bytes);
  const std::uint64_t bytes = share > 0 ? static_cast<std::uint64_t>(share) : options_.arena_bytes;
  const std::uint64_t slabs = bytes / options_.slab_bytes;
  if (slabs < options_.least_slabs || slabs * options_.slab_bytes / kOffsetUnitBytes > kOffsetMask) {
    made.why_not = "the arena would be " + std::to_string(slabs) + " slabs of " + shown(options_.slab_bytes) +
                   ", and at least " + std::to_string(options_.least_slabs) +
                   " slabs are needed; raise arena_bytes or lower slab_bytes";
    return false;
  }
  asked_bytes_ = slabs * options_.slab_bytes;
  const std::uint64_t places = places_for(slabs);
  slabs_.start(options_.slab_bytes, static_cast<std::uint32_t>(std::min(slabs, places)),
               static_cast<std::uint32_t>(places), std::strcmp(hello_.device, "host") == 0);
  link_.socket().send({.kind = gpu::MessageKind::begin, .bytes = slabs_.slab_bytes(), .count = slabs_.places()});
  state_ = State::working;
  mirrors_.restart(link_);
  if (options_.kept_arena_bytes != 0) return true;  // its slabs come first, and what is left is filled by and by
  return fill_arena(made, slabs_.limit());
}

// One allocation is made whole. Else places are addresses, which cost nothing: there are some for all of the GPU.
std::uint64_t WorkerDevice::places_for(std::uint64_t slabs) const {
  if (is_legacy()) return slabs;
  if (options_.kept_arena_bytes != 0) return options_.kept_arena_bytes / options_.slab_bytes;
  const std::uint64_t most = std::min({hello_.total_bytes, options_.most_bytes, kOffsetMask * kOffsetUnitBytes});
  return std::max(slabs, most / options_.slab_bytes);
}

MadeWorkerDevice make_worker_device(WorkerOptions options, WorkerLink started) {
  MadeWorkerDevice made;
  auto device = std::make_unique<WorkerDevice>(std::move(options));
  if (!device->start(made, std::move(started))) return made;
  device->arm_first();
  made.device = std::move(device);
  return made;
}

}  // namespace kvq

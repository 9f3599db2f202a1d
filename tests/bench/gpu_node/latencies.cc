// What the node costs on its hot paths and at its edges: steps, pages, publication, grace period, large arenas, host
// memory.
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <thread>

#include "client/abi.h"
#include "tests/bench/gpu_node/llama.h"
#include "tests/bench/gpu_node/node.h"
#include "tests/bench/gpu_node/topics.h"

namespace kvq::bench {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point began) {
  return std::chrono::duration<double, std::micro>(Clock::now() - began).count();
}

// begin and end as the CPU sees them, and how long until the segment says that the GPU has ended an empty step.
void steps(Rows& rows, Llama& llama) {
  std::vector<double> begin_us, end_us, seen_us;
  for (int i = 0; i < 2000; ++i) {
    std::uint64_t step = 0;
    const auto t0 = Clock::now();
    check(kvq_step_begin(llama.model(), &step));
    begin_us.push_back(us_since(t0));
    const auto t1 = Clock::now();
    check(kvq_step_end(llama.model(), step, llama.stream()));
    end_us.push_back(us_since(t1));
    llama.synchronize();
    seen_us.push_back(us_since(t1));
  }
  rows.times("step_begin", "cpu", begin_us);
  rows.times("step_end", "cpu, launch of the stream write", end_us);
  rows.times("step_end_to_synchronized", "empty stream", seen_us);
}

// A page from the magazine, whole life without K and V: reserve and commit nothing, release.
void pages(Rows& rows, Llama& llama) {
  std::vector<double> reserve_us, open_us;
  for (int i = 0; i < 300; ++i) {
    const auto t0 = Clock::now();
    Sequence sequence = llama.open(0);
    open_us.push_back(us_since(t0));
    const auto t1 = Clock::now();
    sequence.reserve(64, 10'000);
    reserve_us.push_back(us_since(t1));
  }
  rows.times("open_empty_sequence", "1", open_us);
  rows.times("reserve_page", "1 page from credits", reserve_us);
}

// All credits given up, then asked for again: the daemon publishes each entry to the mirror before it shows the page.
void credits(Rows& rows, Llama& llama) {
  for (const std::uint32_t count : {1u, 64u, 256u}) {
    std::vector<double> us;
    for (int i = 0; i < 50; ++i) {
      check(kvq_credits_return(llama.model(), 4096));
      const auto t0 = Clock::now();
      check(kvq_credits_request(llama.model(), count, 10'000));
      us.push_back(us_since(t0));
    }
    rows.times("credits_published", std::to_string(count) + " pages", us);
  }
}

// From a released page to the moment when its slot may be used again, as the daemon's limbo tells.
void grace_period(Rows& rows, Node& node, Llama& llama) {
  std::vector<double> us;
  for (int i = 0; i < 15; ++i) {
    {
      Sequence sequence = llama.open(0);
      llama.grow(sequence, 0, 32, 1'000'000 + 64 * static_cast<std::uint64_t>(i));  // a page that no one will find
    }
    const auto t0 = Clock::now();
    while (node.ask("status")["limbo_slots"] != 0) {
      if (us_since(t0) > 5e6) throw std::runtime_error("limbo does not empty");
    }
    us.push_back(us_since(t0));
  }
  rows.times("grace_period", "release to empty limbo, through kvqctl", us);
}

void host_copies(Rows& rows) {
  constexpr std::uint64_t kBytes = 1 << 30;
  const int file = ::memfd_create("kvq-host", 0);
  if (file < 0 || ::ftruncate(file, kBytes) != 0) throw std::runtime_error("memfd");
  void* host = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  const auto t0 = Clock::now();
  must(cudaHostRegister(host, kBytes, cudaHostRegisterDefault), "register");
  rows.value("host_register", "1 GiB memfd", us_since(t0), "us");
  const DeviceBytes device(kBytes);
  for (const auto kind : {cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost}) {
    std::vector<double> us;
    for (int i = 0; i < 9; ++i) {
      const auto t1 = Clock::now();
      const bool up = kind == cudaMemcpyHostToDevice;
      must(cudaMemcpy(up ? device.as<void>() : host, up ? host : device.as<void>(), kBytes, kind), "copy");
      us.push_back(us_since(t1));
    }
    rows.times(kind == cudaMemcpyHostToDevice ? "host_to_device" : "device_to_host", "1 GiB pinned memfd", us,
               {{"bytes", kBytes}, {"gb_s", kBytes / quantile(us, 0.5) / 1e3}});
  }
  cudaHostUnregister(host);
  ::munmap(host, kBytes);
  ::close(file);
}

// How long a start with a large arena takes, and the first session that imports nothing but its directory.
void large_arena(Rows& rows) {
  const auto t0 = Clock::now();
  Node node({.arena_bytes = "120GiB"});
  rows.value("start_with_arena", "480 slabs of 256 MiB", us_since(t0) / 1e3, "ms");
  const auto t1 = Clock::now();
  Llama llama(node.socket(), 9);
  rows.value("first_session", "context, mirror, segment", us_since(t1) / 1e3, "ms");
  const auto status = node.ask("status");
  rows.value("worker_overhead", "its context", status["device_health"]["overhead_bytes"], "bytes");
}

}  // namespace

void latencies(Rows& rows, const Arguments&) {
  host_copies(rows);
  large_arena(rows);
  Node node({.arena_bytes = "16GiB"});
  Llama llama(node.socket(), 3);
  steps(rows, llama);
  pages(rows, llama);
  credits(rows, llama);
  grace_period(rows, node, llama);
}

}  // namespace kvq::bench

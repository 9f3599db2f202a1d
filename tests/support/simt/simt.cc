// Lanes are fibers; one that cannot go on hands over to the loop that runs them in turn.
#include "tests/support/simt/simt.h"

#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace kvq::simt {

Index thread_index, block_index, block_size, grid_size;
std::function<void()> between_launches;

namespace {

constexpr std::size_t kStackBytes = 512 << 10, kSharedBytes = 227 << 10;

struct Warp {
  void* arguments[32] = {};
  const char* place = nullptr;
  std::uint32_t arrived = 0, meeting = 0;
};

struct Copying {
  std::uint32_t to, bytes, barrier;
  std::uint64_t from;
};

struct Barrier {
  std::uint32_t phase = 0, pending_bytes = 0;
  bool arrived = false;
};

struct Lane {
  boost::context::fiber fiber;
  bool over = false;
};

struct Block {
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  std::map<std::uint32_t, Barrier> barriers;
  std::vector<Copying> copies;
  std::uint32_t at_barrier = 0, barrier_round = 0;
  std::uint64_t progress = 0;  // grows with everything that lets somebody go on
};

Block block;
boost::context::fiber scheduler;
std::uint32_t running;  // lane
bool launch_waited;
const std::function<void()>* body;
alignas(1024) std::byte dynamic[kSharedBytes];

[[noreturn]] void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "simt: block %u, thread %u: %s%s\n", block_index.x, running, what, detail);
  std::abort();
}

void yield() { scheduler = std::move(scheduler).resume(); }

// A stack for each lane, used again by every block.
struct KeptStack {
  std::uint32_t lane;
  boost::context::stack_context allocate() {
    static std::vector<boost::context::stack_context> stacks;
    while (stacks.size() <= lane) stacks.push_back(boost::context::fixedsize_stack(kStackBytes).allocate());
    return stacks[lane];
  }
  void deallocate(boost::context::stack_context&) {}
};

boost::context::fiber begin_lane(std::uint32_t lane) {
  return {std::allocator_arg, KeptStack{lane}, [lane](boost::context::fiber&& from) {
            scheduler = std::move(from);
            (*body)();
            block.lanes[lane].over = true;
            ++block.progress;
            return std::move(scheduler);
          }};
}

}  // namespace

void meet(const char* name, void* argument, void (*act)(void* const* arguments)) {
  Warp& warp = block.warps[running / 32];
  if (warp.arrived == 0) warp.place = name;
  if (std::strcmp(warp.place, name) != 0) fail("a lane is elsewhere than its warp, at ", name);
  warp.arguments[running % 32] = argument;
  const std::uint32_t mine = warp.meeting;
  if (++warp.arrived == 32) {
    act(warp.arguments);
    warp.arrived = 0;
    ++warp.meeting;
    ++block.progress;
    return;
  }
  while (warp.meeting == mine) yield();
}

void block_barrier() {
  const std::uint32_t mine = block.barrier_round;
  if (++block.at_barrier == block.lanes.size()) {
    block.at_barrier = 0;
    ++block.barrier_round;
    ++block.progress;
    return;
  }
  while (block.barrier_round == mine) yield();
}

std::byte* shared_memory() { return dynamic; }

std::uint32_t shared_address(const void* at) {
  const auto offset = static_cast<const std::byte*>(at) - dynamic;
  if (offset < 0 || offset > static_cast<std::ptrdiff_t>(kSharedBytes)) fail("an address outside shared memory");
  return static_cast<std::uint32_t>(offset);
}

void prepare_barrier(std::uint32_t barrier) { block.barriers[barrier] = {}; }

void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  const auto found = block.barriers.find(barrier);
  if (found == block.barriers.end()) fail("a barrier that nobody has prepared");
  if (found->second.arrived) fail("a stage is asked for twice in one phase");
  found->second.arrived = true;
  found->second.pending_bytes = bytes;
  ++block.progress;
}

void copy(std::uint32_t to, std::uint64_t from, std::uint32_t bytes, std::uint32_t barrier) {
  if (from % 16 != 0 || to % 16 != 0 || bytes % 16 != 0) fail("a bulk copy that is not aligned to 16 bytes");
  if (to + bytes > kSharedBytes) fail("a bulk copy beyond shared memory");
  std::memset(dynamic + to, 0xff, bytes);
  block.copies.push_back({to, bytes, barrier, from});
}

void wait_barrier(std::uint32_t barrier, std::uint32_t parity) {
  Barrier& it = block.barriers[barrier];
  for (;;) {
    if ((it.phase & 1) != parity) return;
    if (it.arrived) break;
    yield();
  }
  for (std::size_t i = 0; i < block.copies.size();) {
    const Copying& c = block.copies[i];
    if (c.barrier != barrier) {
      ++i;
      continue;
    }
    std::memcpy(dynamic + c.to, reinterpret_cast<const void*>(c.from), c.bytes);
    it.pending_bytes -= c.bytes;
    block.copies.erase(block.copies.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (it.pending_bytes != 0) fail("a barrier expects other bytes than are copied");
  it.arrived = false;
  ++it.phase;
  ++block.progress;
}

void wait_for_launch_before() {
  block_barrier();  // so that all of the block has come as far as it could
  if (!launch_waited && between_launches) between_launches();
  launch_waited = true;
}

void run(std::uint32_t blocks, std::uint32_t threads, std::uint32_t shared_bytes, const std::function<void()>& kernel) {
  if (shared_bytes > kSharedBytes || threads % 32 != 0) fail("a launch that no GPU takes");
  body = &kernel;
  launch_waited = false;
  grid_size = {blocks, 1, 1};
  block_size = {threads, 1, 1};
  for (std::uint32_t b = 0; b < blocks; ++b) {
    block_index = {b, 0, 0};
    std::memset(dynamic, 0xff, sizeof dynamic);
    block.lanes.resize(threads);
    block.warps.assign(threads / 32, {});
    block.barriers.clear();
    block.copies.clear();
    block.at_barrier = block.barrier_round = 0;
    for (std::uint32_t lane = 0; lane < threads; ++lane) block.lanes[lane] = {begin_lane(lane)};
    for (std::uint64_t before = ~0ull; before != block.progress;) {
      before = block.progress;
      for (std::uint32_t lane = 0; lane < threads; ++lane) {
        if (block.lanes[lane].over) continue;
        running = lane;
        thread_index = {lane, 0, 0};
        block.lanes[lane].fiber = std::move(block.lanes[lane].fiber).resume();
      }
    }
    for (std::uint32_t lane = 0; lane < threads; ++lane) {
      running = lane;
      if (!block.lanes[lane].over) fail("waits for ever");
    }
    if (!block.copies.empty()) fail("ends while copies are on their way");
  }
}

}  // namespace kvq::simt

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

struct Meeting {  // of a warp or a warpgroup
  void* arguments[128] = {};
  const char* place = nullptr;
  std::uint32_t arrived = 0, round = 0;
};

struct Copying {
  std::uint32_t to, bytes, barrier;
  std::uint64_t from;
};

struct Barrier {
  std::uint32_t arrivals = 1, phase = 0, arrived = 0, pending_bytes = 0;
};

struct OwnCopy {
  std::uint32_t to, bytes;
  std::uint64_t from;
};

struct Lane {
  boost::context::fiber fiber;
  bool over = false;
  const std::uint32_t* watched = nullptr;  // it goes on when this is no longer `seen`
  std::uint32_t seen = 0;
  std::vector<std::vector<OwnCopy>> groups;  // on their way; the last one is not committed
};

struct Block {
  std::vector<Lane> lanes;
  std::vector<Meeting> warps, warpgroups;
  std::map<std::uint32_t, Barrier> barriers;
  std::vector<Copying> copies;
  std::uint32_t at_barrier = 0, barrier_round = 0;
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

void wait_while(const std::uint32_t& watched, std::uint32_t seen) {
  Lane& lane = block.lanes[running];
  lane.watched = &watched, lane.seen = seen;
  while (watched == seen) scheduler = std::move(scheduler).resume();
  lane.watched = nullptr;
}

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
            return std::move(scheduler);
          }};
}

}  // namespace

void meet(const char* name, void* argument, void (*act)(void* const* arguments), std::uint32_t lanes) {
  Meeting& here = lanes == 32 ? block.warps[running / 32] : block.warpgroups[running / 128];
  if (here.arrived == 0) here.place = name;
  if (std::strcmp(here.place, name) != 0) fail("a lane is elsewhere than the others, at ", name);
  here.arguments[running % lanes] = argument;
  const std::uint32_t mine = here.round;
  if (++here.arrived == lanes) {
    act(here.arguments);
    here.arrived = 0;
    ++here.round;
    return;
  }
  wait_while(here.round, mine);
}

void block_barrier() {
  const std::uint32_t mine = block.barrier_round;
  if (++block.at_barrier == block.lanes.size()) {
    block.at_barrier = 0;
    ++block.barrier_round;
    return;
  }
  wait_while(block.barrier_round, mine);
}

std::byte* shared_memory() { return dynamic; }

std::uint32_t shared_address(const void* at) {
  const auto offset = static_cast<const std::byte*>(at) - dynamic;
  if (offset < 0 || offset > static_cast<std::ptrdiff_t>(kSharedBytes)) fail("an address outside shared memory");
  return static_cast<std::uint32_t>(offset);
}

void prepare_barrier(std::uint32_t barrier, std::uint32_t arrivals) {
  block.barriers[barrier] = {};
  block.barriers[barrier].arrivals = arrivals;
}

namespace {

Barrier& barrier_at(std::uint32_t at) {
  const auto found = block.barriers.find(at);
  if (found == block.barriers.end()) fail("a barrier that nobody has prepared");
  return found->second;
}

// Where all have arrived: brings the bytes that are still on their way, and begins the next phase.
void complete(std::uint32_t barrier, Barrier& it) {
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
  it.arrived = 0;
  ++it.phase;
}

// Copies arrive as late as they can: when nobody can go on without them.
bool deliver() {
  bool any = false;
  for (auto& [at, it] : block.barriers) {
    if (it.arrived != it.arrivals) continue;
    complete(at, it);
    any = true;
  }
  return any;
}

}  // namespace

void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  Barrier& it = barrier_at(barrier);
  if (it.arrived == it.arrivals) complete(barrier, it);  // its bytes may be there at any time
  it.pending_bytes += bytes;
  if (++it.arrived == it.arrivals && it.pending_bytes == 0) complete(barrier, it);
}

void arrive(std::uint32_t barrier) { expect_bytes(barrier, 0); }

void copy(std::uint32_t to, std::uint64_t from, std::uint32_t bytes, std::uint32_t barrier) {
  if (from % 16 != 0 || to % 16 != 0 || bytes % 16 != 0) fail("a bulk copy that is not aligned to 16 bytes");
  if (to + bytes > kSharedBytes) fail("a bulk copy beyond shared memory");
  std::memset(dynamic + to, 0xff, bytes);
  block.copies.push_back({to, bytes, barrier, from});
}

void wait_barrier(std::uint32_t barrier, std::uint32_t parity) {
  const Barrier& it = barrier_at(barrier);
  if ((it.phase & 1) == parity) wait_while(it.phase, it.phase);
}

void copy_own(std::uint32_t to, std::uint64_t from, std::uint32_t bytes) {
  if (from % 16 != 0 || to % 16 != 0 || to + 16 > kSharedBytes) fail("a copy that is not aligned to 16 bytes");
  auto& groups = block.lanes[running].groups;
  if (groups.empty()) groups.emplace_back();
  std::memset(dynamic + to, 0xff, 16);
  groups.back().push_back({to, bytes, from});
}

void commit_own() { block.lanes[running].groups.emplace_back(); }

void wait_own(std::uint32_t groups_left) {
  auto& groups = block.lanes[running].groups;
  while (groups.size() > groups_left + 1) {
    for (const OwnCopy& c : groups.front()) {
      std::memset(dynamic + c.to, 0, 16);
      if (c.bytes != 0) std::memcpy(dynamic + c.to, reinterpret_cast<const void*>(c.from), c.bytes);
    }
    groups.erase(groups.begin());
  }
}

void wait_for_launch_before() {
  block_barrier();  // so that all of the block has come as far as it could
  if (!launch_waited && between_launches) between_launches();
  launch_waited = true;
}

void run(Index blocks, std::uint32_t threads, std::uint32_t shared_bytes, const std::function<void()>& kernel) {
  if (shared_bytes > kSharedBytes || threads % 32 != 0) fail("a launch that no GPU takes");
  body = &kernel;
  launch_waited = false;
  grid_size = blocks;
  block_size = {threads, 1, 1};
  for (std::uint32_t b = 0; b < blocks.x * blocks.y; ++b) {
    block_index = {b % blocks.x, b / blocks.x, 0};
    std::memset(dynamic, 0xff, sizeof dynamic);
    block.lanes.resize(threads);
    block.warps.assign(threads / 32, {});
    block.warpgroups.assign(threads / 128 + 1, {});
    block.barriers.clear();
    block.copies.clear();
    block.at_barrier = block.barrier_round = 0;
    for (std::uint32_t lane = 0; lane < threads; ++lane) block.lanes[lane] = {begin_lane(lane)};
    for (bool going = true; going;) {
      going = false;
      for (std::uint32_t i = 0; i < threads; ++i) {
        Lane& lane = block.lanes[i];
        if (lane.over || (lane.watched != nullptr && *lane.watched == lane.seen)) continue;
        going = true;
        running = i;
        thread_index = {i, 0, 0};
        lane.fiber = std::move(lane.fiber).resume();
      }
      going = going || deliver();
    }
    for (std::uint32_t lane = 0; lane < threads; ++lane) {
      running = lane;
      if (!block.lanes[lane].over) fail("waits for ever");
    }
    if (!block.copies.empty()) fail("ends while copies are on their way");
  }
}

}  // namespace kvq::simt

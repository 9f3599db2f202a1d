// Runs CUDA kernels on the host: one thread of the host plays all lanes of a block, one block after the other.
//
// Invariant: lanes are contexts of their own that run until they meet others (a shuffle, a matrix product, a barrier)
// or wait for a copy. Lanes of a warp that meet at different places, and blocks in which nobody can go on, abort with a
// message: on a GPU they would hang, or worse. Time, caches, and what blocks do to each other while both run are not
// played.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvq::simt {

struct Index {
  std::uint32_t x = 0, y = 0, z = 0;
};

// Of the lane that runs.
extern Index thread_index, block_index, block_size, grid_size;

// All lanes of a warp (32) or of a warpgroup (128) come here, each with its argument; `act` sees all of them once.
// `name` says where they are.
void meet(const char* name, void* argument, void (*act)(void* const* arguments), std::uint32_t lanes = 32);
void block_barrier();

// Dynamic shared memory of the block, and addresses in it.
std::byte* shared_memory();
std::uint32_t shared_address(const void* at);

// Barriers in shared memory. expect_bytes() arrives, too.
void prepare_barrier(std::uint32_t barrier, std::uint32_t arrivals);
void arrive(std::uint32_t barrier);
void expect_bytes(std::uint32_t barrier, std::uint32_t bytes);
// The bytes are not there before somebody waits; what was there is gone at once.
void copy(std::uint32_t to, std::uint64_t from, std::uint32_t bytes, std::uint32_t barrier);
void wait_barrier(std::uint32_t barrier, std::uint32_t parity);

// The lane's own copies of 16 bytes, of which the first `bytes` come from there and the others are zero; in groups.
void copy_own(std::uint32_t to, std::uint64_t from, std::uint32_t bytes);
void commit_own();
void wait_own(std::uint32_t groups_left);

// What the launch before still does when all lanes of this one's first block wait for its end; every lane waits once.
extern std::function<void()> between_launches;
void wait_for_launch_before();

// Now, or whenever the graph is launched that is being captured.
void launch(std::function<void()> work);
void run(Index blocks, std::uint32_t threads, std::uint32_t shared_bytes, const std::function<void()>& kernel);

}  // namespace kvq::simt

// Times of launches on the GPU, and what its memory gives at best.
//
// Invariant: a time is the median over replays of one graph divided by the graph's launches, so that no launch waits
// for the host.
#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace kvq::bench {

// In microseconds, of one of `launches` that `enqueue(i, stream)` puts on the stream.
double median_us(int launches, const std::function<void(int, cudaStream_t)>& enqueue);

// TB/s. Read: one-shot blocks of 32 KiB over 4 GiB; copy: bytes read and bytes written, 2 GiB each.
double read_ceiling_tb_s();
double copy_ceiling_tb_s();

// Anything in fp16 from -1 to 1, the same for the same seed.
void fill_halves(void* at, std::size_t count, std::uint32_t seed);

}  // namespace kvq::bench

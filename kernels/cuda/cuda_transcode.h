// Transcoding on the device: whole pages from one format and slot to another, many in one launch.
//
// Invariant: a batch is one geometry and one pair of formats, all layers and heads of all its pages in one launch; sources are only
// read; the destination of a job that reports an error is undefined. Nothing waits. A batch that finds no other in flight begins
// when the stream has passed what is there. Those in flight may overlap, so none touches a page that another one writes, and nothing
// else goes on the stream meanwhile. A batch is done when all its pages are there for everybody, a little before its kernel has ended.
//
// The page checksum of the device is page_sum() (kernels/page_sum.h): cheap to fuse into a pass over the page in any
// order, and computed alike on the host. It finds damage, not malice.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "kernels/cuda/cuda_kernels.h"

namespace kvq::cuda {

// Device pointers to whole slots, aligned to 16 bytes. Equal formats copy; with `to` null in the batch the source is only
// summed up. Slots of one batch do not overlap.
struct PageJob {
  const std::byte* source = nullptr;
  std::byte* destination = nullptr;
  std::uint64_t checksum = 0;  // of the source
  bool has_checksum = false;   // compare first: a source that differs is lost_page and its destination is not to be used
};

struct PageJobDone {
  Errc code = Errc::ok;        // lost_page: not what its checksum says; else invalid_argument: non-finite or beyond fp16
  std::uint64_t checksum = 0;  // of the destination; of the source when it was only summed up
};

// Owns the staging memory for the batches of one stream, on the device that was current in create(), which is current in every
// call. One thread at a time. Its end waits for the batches in flight.
class Transcoder {
 public:
  // At most `max_jobs` pages are in one batch and `batches` batches in flight. Errors: no_memory, system.
  static Result<std::unique_ptr<Transcoder>> create(std::uint32_t max_jobs, std::uint32_t batches, Stream stream);
  virtual ~Transcoder() = default;

  // Launches; `ticket` (0 .. batches-1) names the batch until collect() has returned its results.
  // An empty batch is allowed. Errors: invalid_argument (too many jobs, a pair of different quantized formats, a bad pointer),
  // wrong_layout, limit_reached (batches in flight), context_lost, system.
  virtual Result<std::uint32_t> launch(const ModelGeometry& geometry, const PageLayout& from, const PageLayout* to,
                                       std::span<const PageJob> jobs) = 0;
  // Whether the batch is over. Errors: context_lost, system (`native` is the driver's code); the ticket is then still taken.
  virtual Result<bool> is_done(std::uint32_t ticket) = 0;
  // Once done: the results, in the order of the jobs; the ticket is free again.
  virtual void collect(std::uint32_t ticket, std::span<PageJobDone> results) = 0;
};

}  // namespace kvq::cuda

// The worker's jobs on the GPU: grouped by model and formats, run in batches on a low-priority stream, answered once
// each.
//
// Invariant: every job that was submitted is answered by poll() exactly once, unless the context is lost. A job whose
// places are not in mapped slabs never reaches the GPU, since one wild access would take the whole context with it.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "daemon/gpu/cuda_context.h"
#include "daemon/gpu/worker_protocol.h"
#include "kernels/cuda/cuda_transcode.h"

namespace kvq::gpu {

class CudaJobs {
 public:
  // The memory of a slot at this offset of the arena; null where no slab is mapped or the slot does not fit into it.
  using Locate = std::function<std::byte*(std::uint64_t offset_bytes, std::uint64_t bytes)>;

  static Result<std::unique_ptr<CudaJobs>> create(const CudaContext& context, Locate locate);
  ~CudaJobs();
  CudaJobs(const CudaJobs&) = delete;
  CudaJobs& operator=(const CudaJobs&) = delete;

  void add_model(std::uint32_t number, const ModelGeometry& geometry);
  void submit(std::span<const Job> jobs);
  // Collects, then launches what is due. Whether anything is left. Errors: context_lost.
  Result<bool> poll(std::vector<JobDone>& done);

 private:
  using Clock = std::chrono::steady_clock;
  struct Model {
    ModelGeometry geometry;
    PageLayout layout[kFormatCount];
  };
  struct Group {
    std::uint64_t key;  // model, from, to
    std::deque<Job> jobs;
    Clock::time_point oldest;
  };
  struct Batch {
    std::uint32_t ticket;
    std::vector<std::uint64_t> ids;
  };

  CudaJobs(const CudaContext& context, Locate locate) : context_(context), locate_(std::move(locate)) {}
  std::uint32_t batch_jobs() const;
  bool is_due(const Group& group, Clock::time_point now) const;
  Result<void> collect(std::vector<JobDone>& done);
  Result<void> launch(Group& group, std::vector<JobDone>& done);

  const CudaContext& context_;
  const Locate locate_;
  cuda::Stream stream_ = nullptr;
  std::unique_ptr<cuda::Transcoder> transcoder_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Model>> models_;
  std::deque<Group> groups_;  // those with waiting jobs, in the order of their first one
  std::deque<Batch> running_;
};

}  // namespace kvq::gpu

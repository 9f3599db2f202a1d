// The worker's jobs on the GPU: grouped by model and formats, run in batches on a low-priority stream at the pace of
// batch_pace.h, answered once each.
//
// Invariant: every job that was submitted is answered by poll() exactly once, unless the context is lost. A job whose
// places are not in mapped slabs never reaches the GPU, since one wild access would take the whole context with it.
// Batches in flight may overlap, and so may the pages of one: that no job depends on another one that has not been
// answered is kvqd's part (daemon/store_transcode.cc says why it holds).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "daemon/gpu/batch_pace.h"
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
  // Somebody waits for memory: what waits and what comes starts without the pace's pause.
  void set_urgent(bool urgent) { urgent_ = urgent; }
  // Collects, then launches what is due. Whether anything is left. Errors: context_lost.
  Result<bool> poll(std::vector<JobDone>& done);
  // How long nothing can happen unless something is submitted or becomes urgent.
  PaceTime quiet() const;

 private:
  struct Model {
    ModelGeometry geometry;
    PageLayout layout[kFormatCount];
  };
  struct Group {
    std::uint64_t key;         // model, from, to
    std::uint64_t page_bytes;  // of a source
    std::deque<Job> jobs;
    PaceTime oldest;
  };
  struct Measured {  // a layer of a job's page: its blocks on the device, before and after
    std::size_t job;
    const LayerSpec* spec;
    const LayerPlace *dense, *cold;
    const std::byte *before, *after;
  };
  struct Batch {
    std::uint32_t ticket;
    std::vector<std::uint64_t> ids;
    std::vector<Measured> measured;
  };

  CudaJobs(const CudaContext& context, Locate locate);
  std::uint64_t source_bytes(const Job& job) const;
  BatchPace::Waiting waiting() const;
  Result<void> collect(std::vector<JobDone>& done);
  // Waits for some 0.3 MB from the device, and computes about as long as that takes. kvqd asks for few.
  Result<float> measure(const Measured& m);
  Result<void> launch(Group& group, std::uint64_t most_jobs, std::vector<JobDone>& done);

  const CudaContext& context_;
  const Locate locate_;
  cuda::Stream stream_ = nullptr;
  std::unique_ptr<cuda::Transcoder> transcoder_;
  std::unordered_map<std::uint32_t, std::unique_ptr<Model>> models_;
  std::deque<Group> groups_;  // those with waiting jobs, in the order of their first one
  std::deque<Batch> running_;
  std::vector<std::byte> before_, after_;  // of a measured layer
  BatchPace pace_;
  bool urgent_ = false;
};

}  // namespace kvq::gpu

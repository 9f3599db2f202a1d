// The worker's hold of one GPU: its primary context, as small as it can be, and what hello tells of it.
//
// Invariant: the context is current on the thread that opened it, until the object goes; no call of the worker spins,
// since the context waits by blocking and nothing in it waits.
#pragma once

#include <memory>
#include <string>

#include "daemon/gpu/nvml.h"
#include "kernels/cuda/vmm.h"

namespace kvq::gpu {

class CudaContext {
 public:
  // `uuid` empty: the first visible GPU. `why_not` is one line for people: what was looked for and what there is.
  static Result<std::unique_ptr<CudaContext>> open(const std::string& uuid, std::string& why_not);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const cuda::Driver& driver() const { return driver_; }
  const cuda::Gpu& gpu() const { return gpu_; }
  bool in_mps() const { return in_mps_; }
  // What its memory can give at most, by its clock and width; 0: the driver does not say.
  std::uint64_t gpu_bytes_per_s() const { return gpu_bytes_per_s_; }
  Result<std::uint64_t> free_bytes() const;
  // By how much more memory is in use than before this context was made, so asked soon after; 0: not known.
  std::uint64_t overhead_bytes() const;

 private:
  CudaContext(const cuda::Driver& driver, cuda::Gpu gpu) : driver_(driver), gpu_(std::move(gpu)) {}
  Result<void> enter();

  const cuda::Driver& driver_;
  const cuda::Gpu gpu_;
  bool retained_ = false, in_mps_ = false;
  std::uint64_t used_before_ = 0, gpu_bytes_per_s_ = 0;
  const Nvml nvml_;
};

}  // namespace kvq::gpu

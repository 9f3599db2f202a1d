// One model's calls on the GPU.
//
// Invariant: append, attend, merge and end_step put work on the caller's stream and return; they touch no state that
// another thread changes but the workspace, which is for one stream at a time. Everything else that is made here is
// made at registration or on first use, under the mutex; a lost context keeps what of it is the context's.
#pragma once

#include <memory>
#include <mutex>

#include "client/cuda_side.h"
#include "kernels/cuda/cuda_transcode.h"

namespace kvq::client {

class CudaModelSide final : public ModelSide {
 public:
  CudaModelSide(CudaSide& device, Segment& segment);
  ~CudaModelSide() override;
  kvq_status attach();  // once, before any other call

  kvq_status end_step(StepSlot& slot, std::uint64_t serial, void* stream) override;
  kvq_status append(AppendCall call, const kvq_append_args& args, const Aliases& aliases) override;
  kvq_status attend(AttentionCall call, const kvq_attend_args& args, const Aliases& aliases) override;
  kvq_status merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                   std::uint32_t head_dim, void* stream) override;
  kvq_status copy_page(const ModelView& model, const PageCopy& copy) override;
  kvq_status show_aliases(const kvq_alias* aliases, std::size_t count, void* stream) override;
  kvq_status show_aliases_now(const kvq_alias* aliases, std::size_t count) override;
  kvq_status workspace_bytes(const ModelView& model, std::uint32_t query_heads, std::size_t& bytes) override;
  void take_fault(kvq_fault& out) override;
  kvq_status check_context() override;
  kvq_status ask_context() override;

 private:
  // Memory of the CPU that the GPU can write: pages of `at`, by their GPU address.
  struct Registered {
    void* at = nullptr;
    CUdeviceptr device = 0;
  };
  kvq_status register_memory(const char* what, void* at, Registered& out);
  kvq_status refuse_capture(const char* call, cuda::Stream stream);
  kvq_status make_alias_table();
  kvq_status make_workspace(std::size_t bytes);
  kvq_status start(const char* call, const ContextScope& scope);
  // As far as known, without a question to the driver.
  kvq_status check_known() const { return device_.lost() ? device_.say_lost("this model") : KVQ_OK; }

  CudaSide& device_;
  Segment& segment_;
  Registered steps_, fault_;
  cuda::Stream stream_ = nullptr;  // for what has no stream of the caller's
  std::mutex mutex_;
  std::unique_ptr<cuda::Transcoder> transcoder_;     // guarded by mutex_
  std::atomic<std::int32_t*> alias_table_{nullptr};  // 2^24 entries of the GPU's memory
  std::atomic<void*> workspace_{nullptr};
  std::size_t workspace_bytes_ = 0;  // set before workspace_
};

}  // namespace kvq::client

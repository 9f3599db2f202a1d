// What differs between devices: how a tenant's pages get into this process, what runs on them, and how a step ends
// there.
//
// Invariant: everything above (sessions, sequences, rings, the wire) is the same for all devices and calls these two
// interfaces only. A DeviceSide lives as long as its TenantMemory and outlives the ModelSides that it made. On a device
// whose context is lost every call returns CONTEXT_LOST, for good, and nothing runs there any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/aliases.h"
#include "kernels/host_kernels.h"
#include "kvq/directory.h"
#include "kvq/kvq.h"
#include "kvq/segment.h"

namespace kvq::client {

// Ends steps, behind what was launched on their stream. Any thread.
class StepEnder {
 public:
  // OK: `slot.ended` gets `serial` now or once the stream has got so far, whatever becomes of this process's threads.
  // CONTEXT_LOST: it never will, and nothing of the step runs any more. Other errors: the step goes on.
  virtual kvq_status end_step(StepSlot& slot, std::uint64_t serial, void* stream) = 0;

 protected:
  ~StepEnder() = default;
};

// A page to be rewritten in another layout elsewhere. Places are bytes from the arena's base.
struct PageCopy {
  PageId page;  // for error texts
  const PageLayout& from;
  std::uint64_t source_bytes;
  const PageLayout& to;
  std::uint64_t destination_bytes;
};

// One model's calls on its device. append, attend, merge and end_step from any thread.
class ModelSide : public StepEnder {
 public:
  virtual ~ModelSide() = default;
  // `call` is what `args` say, checked for layer, heads and data types; `args` has the rest.
  virtual kvq_status append(AppendCall call, const kvq_append_args& args, const Aliases& aliases) = 0;
  virtual kvq_status attend(AttentionCall call, const kvq_attend_args& args, const Aliases& aliases) = 0;
  virtual kvq_status merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                           std::uint32_t head_dim, void* stream) = 0;
  // Returns when it is done.
  virtual kvq_status copy_page(const ModelView& model, const PageCopy& copy) = 0;
  // These were set in the model's table: shows them to kernels, in the order of `stream` ...
  virtual kvq_status show_aliases(const kvq_alias* aliases, std::size_t count, void* stream) = 0;
  // ... or at once, when none runs.
  virtual kvq_status show_aliases_now(const kvq_alias* aliases, std::size_t count) = 0;
  virtual kvq_status workspace_bytes(const ModelView& model, std::uint32_t query_heads, std::size_t& bytes) = 0;
  virtual void take_fault(kvq_fault& out) = 0;
  // OK, or CONTEXT_LOST: the context is known to be broken, or is another than at registration ...
  virtual kvq_status check_context() = 0;
  // ... or the driver says that it is broken.
  virtual kvq_status ask_context() = 0;
};

// Calls come one at a time (TenantMemory's mutex), arena() and entries() from any thread.
class DeviceSide {
 public:
  virtual ~DeviceSide() = default;
  // Finds the device; before the first map. Twice is once.
  virtual kvq_status open() = 0;
  // Maps slab number `slab` at arena() + slab * slab_bytes, in place of what is there. `fd` is the caller's.
  virtual kvq_status map(std::uint32_t slab, int fd, bool writable) = 0;
  virtual void unmap(std::uint32_t slab) = 0;
  // Maps the directory's copy for kernels, read-only. Twice is once.
  virtual kvq_status map_mirror(int fd, std::uint64_t bytes) = 0;
  // Null before the first map.
  virtual std::byte* arena() const = 0;
  // The entries that kernels read, on a device whose memory is not the host's; null: the directory itself.
  virtual const DirectoryEntry* mirror() const = 0;
  // Whether the memory that is mapped goes when kvqd does, so that no session can be resumed.
  virtual bool ends_with_daemon() const { return false; }
  virtual kvq_status make_model_side(Segment& segment, std::unique_ptr<ModelSide>& out) = 0;  // `segment` outlives it
};

// Of a control session, which computes nothing.
std::unique_ptr<ModelSide> make_control_side();

std::unique_ptr<DeviceSide> make_host_side(std::uint64_t arena_bytes, std::uint64_t slab_bytes);

// `uuid`: of the GPU, as kvqd names it. Without CUDA in this build open() says so.
std::unique_ptr<DeviceSide> make_cuda_side(std::uint64_t arena_bytes, std::uint64_t slab_bytes,
                                           const std::string& uuid);

// Which of the `visible` GPUs (their UUIDs, in the driver's order) is `wanted`; INVALID_ARGUMENT names it, what there
// is, and `visible_devices` (CUDA_VISIBLE_DEVICES; null: not set).
kvq_status choose_device(const std::string& wanted, std::span<const std::string> visible, const char* visible_devices,
                         std::size_t& index);

// What this process sees of GPUs, without making a context.
struct VisibleGpus {
  std::vector<std::string> uuids;      // in the driver's order
  std::optional<std::size_t> current;  // whose context is current on this thread
  const char* setting = nullptr;       // CUDA_VISIBLE_DEVICES; null: not set
};
kvq_status find_visible_gpus(VisibleGpus& out);

// Which of the GPUs that kvqd serves a model gets that names none: the current one, else the first visible one;
// INVALID_ARGUMENT names what kvqd serves, what is visible and the setting.
kvq_status choose_served(std::span<const std::string> served, const VisibleGpus& visible, std::string& uuid);

}  // namespace kvq::client

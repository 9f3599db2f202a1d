// A registered model: one session with the daemon, everything of it that sequences and kernels need.
//
// Invariant: the rings and the sequence ids change only under mutex(), which is held across no RPC and no copy. Calls
// that only read shared memory (lookup, attend, append, steps) take no lock of the model. They go on while the daemon
// is away, as do calls that only need the rings, since the next daemon drains the same rings.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "client/aliases.h"
#include "client/connection.h"
#include "client/device.h"
#include "client/prefix_keys.h"
#include "client/rings.h"
#include "client/steps.h"
#include "kernels/host_kernels.h"
#include "kvq/kvq.h"
#include "kvq/page_format.h"
#include "kvq/step_protocol.h"

namespace kvq::client {

class Deadline {
 public:
  // 0 ms has passed already, and reads no clock.
  explicit Deadline(std::uint64_t ms) {
    if (ms != 0) until_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
  }
  std::uint32_t left_ms() const;  // rounded up; 0 when it has passed

 private:
  std::chrono::steady_clock::time_point until_{};
};

class Model {
 public:
  using Lock = std::unique_lock<std::mutex>;

  static kvq_status open(Connection& connection, const kvq_model_desc& desc, std::shared_ptr<Model>& out);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  kvq_status close();  // INVALID_ARGUMENT while a step is open, or runs on the GPU

  kvq_status check_open() const;                  // STALE_ID once closed
  kvq_status check_session() const;               // also DAEMON_GONE once the session is lost
  kvq_status check_admission() const;             // also DRAINING, for callers that admit something
  kvq_status check_data(const char* call) const;  // INVALID_ARGUMENT for the control role

  // What follows below is used with the lock held.
  Lock lock() { return Lock(mutex_); }
  // Returns with room for `commands` in the ring and `credits` pages at hand, or an error: then nothing was taken.
  // Gives the lock up while it waits. A full ring of a daemon that is away is waited for until the deadline of calls
  // that want credits, and for a fixed time by the others, which have none.
  kvq_status prepare(Lock& lock, std::uint32_t commands, std::uint32_t credits, const Deadline& deadline);
  Rings& rings(const Lock&) { return rings_; }
  // Ends a sequence: now, or once a full ring has room again.
  void release(SequenceId id);
  // Ends a sequence of which nobody knows whether the daemon has made it; its id is not used again.
  void abandon(SequenceId id);
  kvq_status take_sequence_id(const Lock&, SequenceId& id);  // LIMIT_REACHED
  void give_sequence_id(const Lock&, SequenceId id) { free_ids_.push_back(raw(id)); }

  kvq_status request_credits(std::uint32_t pages, std::uint32_t deadline_ms);
  kvq_status return_credits(std::uint32_t pages);
  kvq_status get_pressure(kvq_pressure& out);
  kvq_status lost_pages(std::uint64_t since, LostPages& out);
  void get_info(kvq_model_info& out) const;

  // Copies a page of any format into the open page `to`, dense, inside a step of its own. Step `written_in` of this
  // session wrote to it last (0: none that may still run); it is waited for.
  kvq_status copy_page(PageId from, PageId to, std::uint64_t written_in);
  kvq_status append(const kvq_append_args& args);
  kvq_status attend(const kvq_attend_args& args);
  kvq_status merge(float* out_a, float* lse_a, const float* out_b, const float* lse_b, std::uint64_t rows,
                   std::uint32_t head_dim, void* stream);
  kvq_status workspace_bytes(std::size_t& bytes);
  kvq_status begin_step(std::uint64_t& step);
  kvq_status end_step(std::uint64_t step, void* stream) { return steps_.end(step, stream); }
  // `now`: waits for the steps that run; else in the order of `stream`.
  kvq_status set_aliases(const kvq_alias* aliases, std::size_t count, bool now, void* stream);
  void take_fault(kvq_fault& out) { side_->take_fault(out); }

  Connection::Session& session() { return *session_; }
  const TenantMemory& memory() const { return *grant_.memory; }
  SessionId session_id() const { return grant_.session; }
  bool control() const { return role_ == KVQ_ROLE_CONTROL; }
  bool format_floor_dense() const { return floor_dense_; }
  const Key& root() const { return root_; }
  const Key& digest() const { return digest_; }
  const ModelGeometry& geometry() const { return geometry_; }
  int notice_fd() const { return grant_.notice.get(); }
  Steps& steps() { return steps_; }
  Entry entry(PageId page) const { return unpack_entry(load_entry<SharedMemory>(memory().entries()[raw(page)])); }

 private:
  Model(const kvq_model_desc& desc, const ModelGeometry& geometry, Grant grant,
        std::unique_ptr<Connection::Session> session, std::unique_ptr<ModelSide> side);
  bool on_gpu() const { return !control() && !memory().shape().device_uuid.empty(); }
  kvq_status wait_until_over(std::uint64_t step);
  kvq_status settle_running(const char* call);
  void push_release(SequenceId id);
  Segment& segment() const { return *reinterpret_cast<Segment*>(grant_.segment->data()); }
  ModelView view() const { return {&geometry_, layouts_}; }
  PageSource pages() const { return {memory().kernel_entries(), memory().directory().capacity, memory().arena()}; }

  ModelGeometry geometry_;
  PageLayout layouts_[kFormatCount];
  std::vector<std::uint16_t> query_heads_;  // by layer
  const kvq_role role_;
  const bool floor_dense_;
  Key root_, digest_;
  Grant grant_;
  const std::unique_ptr<Connection::Session> session_;
  std::atomic<bool> closed_{false};
  Aliases aliases_;
  std::size_t workspace_bytes_ = 0;  // of the model's own, for any attend call; 0 on the host
  std::unique_ptr<ModelSide> side_;  // gone before the segment in grant_
  Steps steps_;
  std::mutex mutex_;
  Rings rings_;                          // guarded by mutex_
  std::vector<SequenceId> unreleased_;   // guarded by mutex_: the ring had no room for their release
  std::vector<std::uint32_t> free_ids_;  // guarded by mutex_
  std::uint32_t next_id_ = 1;            // guarded by mutex_
};

}  // namespace kvq::client

// What the worker's device is made of. Included by daemon/device/worker_device*.cc alone; the rest sees
// worker_device.h.
//
// Invariant: in state `working` the worker has been told of everything that exists; in all others nothing is sent. Jobs
// are failed and a next worker started only from `waiting`, which is entered when the old process is gone. `lost` is
// the end: the memory has gone with its worker.
#pragma once

#include "daemon/device/job_book.h"
#include "daemon/device/mirror_book.h"
#include "daemon/device/slab_book.h"
#include "daemon/device/worker_device.h"
#include "daemon/device/worker_watch.h"

namespace kvq {

class WorkerDevice final : public Device {
 public:
  explicit WorkerDevice(WorkerOptions options);
  ~WorkerDevice() override;

  // Start-up, worker_device_start.cc: fills `made` but for the device; false: why_not is there.
  bool start(MadeWorkerDevice& made, WorkerLink started);
  // So that the loop's first tick comes soon, and mirrors are there before anybody needs them.
  void arm_first() { arm(1); }

  std::string name() const override { return hello_.device; }
  bool can_adopt() const override { return !is_legacy(); }
  std::uint64_t arena_bytes() const override { return std::uint64_t{slabs_.limit()} * slabs_.slab_bytes(); }
  std::uint64_t slab_bytes() const override { return slabs_.slab_bytes(); }
  std::uint64_t asked_bytes() const override { return asked_bytes_; }
  std::uint64_t most_bytes() const override { return std::uint64_t{slabs_.places()} * slabs_.slab_bytes(); }
  bool can_resize() const override { return !is_legacy(); }
  void resize(std::uint64_t bytes) override;

  Result<void> create_slab(SlabId slab) override;
  Result<void> adopt_slab(SlabId slab, Descriptor& file, std::uint64_t serial) override;
  std::uint64_t slab_serial(SlabId slab) const override { return slabs_.slab(slab).serial; }
  void destroy_slab(SlabId slab) override;
  int descriptor(SlabId slab, bool writable) const override;

  bool has_mirrors() const override { return true; }
  void add_mirror(TenantId tenant, const DirectoryEntry* entries, std::uint32_t capacity, Descriptor adopted) override;
  int mirror_descriptor(TenantId tenant) const override { return mirrors_.descriptor(tenant, published()); }
  void publish(TenantId tenant, PageId page, std::uint64_t entry) override;
  std::uint64_t publications() const override { return mirrors_.count(); }
  std::uint64_t published() const override { return mirrors_.seen(written()); }

  void advance(std::uint64_t now_ms) override;
  int wake_descriptor() const override { return wake_.get(); }
  DeviceHealth health() const override;
  std::uint32_t checks_at_once() const override { return kChecksAtOnce; }
  void set_urgent(bool urgent) override;
  void submit(std::span<const TranscodeJob> jobs) override;
  void poll(std::vector<TranscodeDone>& done) override;
  std::size_t in_flight() const override { return jobs_.unanswered(); }

 private:
  enum class State : std::uint8_t { starting, working, ending, waiting, lost };
  static constexpr std::uint32_t kChecksAtOnce = 256;  // a worker runs whatever waits together, with pauses between

  // worker_device_start.cc
  bool launch(MadeWorkerDevice& made, WorkerLink started);
  bool check_hello(MadeWorkerDevice& made);
  bool fill_arena(MadeWorkerDevice& made, std::uint32_t asked);
  std::uint64_t places_for(std::uint64_t slabs) const;
  // Reads messages until `done` says so; false: the worker ended or said nothing for `most_ms`.
  bool await(const std::function<bool()>& done, std::uint32_t most_ms);

  // worker_device.cc
  // Its memory ends with the worker, so no next one is started.
  bool is_legacy() const { return hello_.exporter == gpu::Exporter::legacy; }
  bool works() const { return state_ == State::working; }
  // Of the worker that serves or is being ended; what it said stays true.
  std::uint64_t written() const { return works() || state_ == State::ending ? link_.written() : 0; }
  void harvest() const;
  void arm(std::uint64_t interval_ms);
  void read_messages();
  void handle(gpu::Packet& packet);
  void handle_failed(const gpu::Message& message);
  void fill();
  void give_surplus();
  void flow();
  void end_worker(std::string cause);
  void collect();
  void start_again();
  void set_up_again();

  const WorkerOptions options_;
  WorkerWatch watch_;
  Descriptor wake_, timer_;  // wake_: an epoll set of the timer, the bell, the socket and the pidfd
  std::uint64_t armed_ms_ = 0;
  std::uint64_t now_ms_ = 0;  // of the last advance()
  State state_ = State::starting;
  bool looped_ = false;  // advance() has been called: from here on nothing waits
  bool greeted_ = false;
  std::uint64_t start_by_ms_ = 0, start_at_ms_ = 0;
  gpu::Hello hello_, greeting_;  // of the first worker; of this one
  WorkerLink link_;
  SlabBook slabs_;
  std::uint64_t asked_bytes_ = 0;
  MirrorBook mirrors_;
  JobBook jobs_;
  bool filling_ = false;  // a `ready` is to come
  std::string shortage_;  // why there are fewer spares than asked for
  std::string cause_;     // why the last worker ended
  std::uint64_t restarts_ = 0;
};

}  // namespace kvq

// Invariant: as in thread_pool.h. One process-wide pool; its mutex is only ever held for a few instructions, and a pool
// that belongs to another process (fork) is left alone, since its mutex may be locked for ever.
#include "kernels/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace kvq {
namespace {

class Pool {
 public:
  Pool() : owner_(::getpid()) {}

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  pid_t owner() const { return owner_; }

  // False when another caller has the pool.
  bool run(std::size_t items, int helpers, void (*run_item)(void*, std::size_t), void* context) {
    std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy) return false;
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(helpers_.size()) < helpers) helpers_.emplace_back([this] { help(); });
      items_ = items;
      run_item_ = run_item;
      context_ = context;
      next_.store(0, std::memory_order_relaxed);
      wanted_ = helpers;
    }
    work_.notify_all();
    drain();
    std::unique_lock lock(mutex_);
    wanted_ = 0;  // helpers that have not woken up yet need not
    idle_.wait(lock, [this] { return active_ == 0; });
    return true;
  }

 private:
  void drain() {
    for (;;) {
      const std::size_t item = next_.fetch_add(1, std::memory_order_relaxed);
      if (item >= items_) return;
      run_item_(context_, item);
    }
  }

  void help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stopping_ || wanted_ > 0; });
      if (stopping_) return;
      --wanted_;
      ++active_;
      lock.unlock();
      drain();
      lock.lock();
      if (--active_ == 0) idle_.notify_one();
    }
  }

  const pid_t owner_;
  std::mutex busy_;  // held by the one caller whose items run
  std::mutex mutex_;
  std::condition_variable work_, idle_;
  std::vector<std::thread> helpers_;
  std::size_t items_ = 0;
  void (*run_item_)(void*, std::size_t) = nullptr;
  void* context_ = nullptr;
  std::atomic<std::size_t> next_{0};
  int wanted_ = 0, active_ = 0;
  bool stopping_ = false;
};

// Joins the helpers at exit or unload; in a forked child the parent's pool is never touched.
struct Holder {
  std::atomic<Pool*> pool{nullptr};
  ~Holder() {
    Pool* mine = pool.load();
    if (mine != nullptr && mine->owner() == ::getpid()) delete mine;
  }
};

Pool& pool() {
  static Holder holder;
  Pool* seen = holder.pool.load(std::memory_order_acquire);
  while (seen == nullptr || seen->owner() != ::getpid()) {
    Pool* fresh = new Pool;
    if (holder.pool.compare_exchange_strong(seen, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;
  }
  return *seen;
}

}  // namespace

void run_items(std::size_t items, int threads, void (*run_item)(void*, std::size_t), void* context) {
  const std::size_t useful = items < static_cast<std::size_t>(threads) ? items : static_cast<std::size_t>(threads);
  if (useful > 1 && pool().run(items, static_cast<int>(useful) - 1, run_item, context)) return;
  for (std::size_t i = 0; i < items; ++i) run_item(context, i);
}

}  // namespace kvq

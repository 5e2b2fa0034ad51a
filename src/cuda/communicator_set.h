#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/executor.h"
#include "distrain/cuda/load.h"
#include "distrain/rpc/device.h"

namespace distrain::cuda {

/// Runs calls that may never return from NCCL on detached threads. Thread-safe.
class DetachedTasks : public std::enable_shared_from_this<DetachedTasks> {
 public:
  void run(base::Task task) noexcept {
    {
      std::lock_guard lock(mutex_);
      ++running_;
    }
    const auto shared = std::make_shared<base::Task>(std::move(task));
    const auto work = [self = shared_from_this(), shared] {
      (*shared)();
      *shared = base::Task();  // destroys its captures before it counts as done
      std::lock_guard lock(self->mutex_);
      --self->running_;
      self->changed_.notify_all();
    };
    try {
      std::thread(work).detach();
    } catch (...) {  // the system cannot start a thread
      work();
    }
  }

  /// Returns when all tasks have returned or `limit` has passed.
  void wait_until(base::TimePoint limit) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, limit, [this] { return running_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;
};

/// A communicator and the stream for its work. A detached thread destroys the communicator.
struct DeviceCommunicator : std::enable_shared_from_this<DeviceCommunicator> {
  DeviceCommunicator(std::unique_ptr<NcclCommunicator> nccl_in, c10::Stream stream_in,
                     std::shared_ptr<DetachedTasks> detached_in)
      : nccl(std::move(nccl_in)), stream(stream_in), detached(std::move(detached_in)) {}
  ~DeviceCommunicator() {
    detached->run([ended = std::move(nccl), device = stream.device()]() mutable {
      rpc::make_current(device);
      ended.reset();
    });
  }

  /// Ends all work for good, on a detached thread.
  void abort() {
    detached->run([self = shared_from_this()] {
      rpc::make_current(self->stream.device());
      self->nccl->abort();
    });
  }

  std::unique_ptr<NcclCommunicator> nccl;
  const c10::Stream stream;
  const std::shared_ptr<DetachedTasks> detached;
  std::mutex in_use;  // held for calls of `nccl`, except abort()
};

/// The error that ended a set's communicators, and whether it was reported. Thread-safe.
class CommunicatorFailure {
 public:
  /// Sets the error and returns true; returns false and keeps the first error if there is one.
  bool fail(const base::Error& error) {
    std::lock_guard lock(mutex_);
    if (error_) return false;
    error_ = error;
    return true;
  }
  std::optional<base::Error> error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }
  /// Returns the error, if any, and marks it as reported.
  std::optional<base::Error> report() {
    std::lock_guard lock(mutex_);
    reported_ = reported_ || error_;
    return error_;
  }
  /// Returns the error if it was not reported yet.
  std::optional<base::Error> unreported() const {
    std::lock_guard lock(mutex_);
    return reported_ ? std::nullopt : error_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<base::Error> error_;
  bool reported_ = false;
};

/// The communicators of a group, one per device, which end together. Thread-safe.
class CommunicatorSet {
 public:
  /// Returns null if the device has no communicator. `number` is the device's number in the group.
  std::shared_ptr<DeviceCommunicator> find(size_t number) const {
    std::lock_guard lock(mutex_);
    const auto it = communicators_.find(number);
    return it == communicators_.end() ? nullptr : it->second;
  }

  void add(size_t number, std::shared_ptr<DeviceCommunicator> communicator) {
    std::unique_lock lock(mutex_);
    if (!failure_->error()) {
      communicators_[number] = std::move(communicator);
    } else {
      lock.unlock();
      communicator->abort();
    }
  }

  /// Aborts all work, for good. Does not wait for the aborts.
  void end(const base::Error& error) {
    // Set the error first: an abort lets streams go on, or may hang.
    if (!failure_->fail(error)) return;
    std::unique_lock lock(mutex_);
    const auto communicators = std::exchange(communicators_, {});
    lock.unlock();
    for (const auto& [number, communicator] : communicators) communicator->abort();
  }

  const std::shared_ptr<CommunicatorFailure>& failure() const { return failure_; }

 private:
  const std::shared_ptr<CommunicatorFailure> failure_ = std::make_shared<CommunicatorFailure>();
  mutable std::mutex mutex_;
  std::map<size_t, std::shared_ptr<DeviceCommunicator>> communicators_;
};

/// Watches work of NCCL in which other ranks may never take part. While there is such work, a
/// thread checks every few milliseconds whether the group has lost a rank, NCCL or the device has
/// failed, or the work is overdue. If so, it ends the communicators.
class Watchdog {
 public:
  struct Options {
    std::function<std::optional<base::Error>()> lost;  ///< returns the loss of a rank of the group
    std::chrono::milliseconds timeout;                 ///< 0: none
    /// How long the group has to find a lost rank when NCCL has reported an error.
    std::chrono::milliseconds loss_grace;
    int world_rank;  ///< of this rank
  };
  struct Item {
    const std::shared_ptr<CommunicatorSet> set;
    const std::shared_ptr<DeviceCommunicator> communicator;
    const std::string op;
    const base::TimePoint since = base::Clock::now();
    std::optional<rpc::StreamPoint> done{};        // guarded by the Watchdog's mutex
    std::optional<base::TimePoint> nccl_failed{};  // used by the Watchdog's thread only
  };

  explicit Watchdog(Options options) : options_(std::move(options)) {}
  /// Checks one last time, then joins the thread.
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  /// Watches an operation from before NCCL is called until `done` is reached. `op` is for messages.
  std::shared_ptr<Item> begin(std::shared_ptr<CommunicatorSet> set,
                              std::shared_ptr<DeviceCommunicator> communicator, std::string op) {
    auto item =
        std::make_shared<Item>(Item{std::move(set), std::move(communicator), std::move(op)});
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    items_.push_back(item);
    if (items_.size() == 1) changed_.notify_all();
    return item;
  }
  /// Sets the point at which NCCL's work for `item` ends.
  void enqueued(const std::shared_ptr<Item>& item, rpc::StreamPoint done) {
    std::lock_guard lock(mutex_);
    item->done = std::move(done);
  }
  /// Stops watching `item`.
  void forget(const std::shared_ptr<Item>& item) {
    std::lock_guard lock(mutex_);
    items_.remove(item);
  }

 private:
  static constexpr std::chrono::milliseconds kCheckEvery{20};

  void run() noexcept {
    pthread_setname_np(pthread_self(), "distrain-nccl");
    std::unique_lock lock(mutex_);
    for (bool last = false; !last;) {
      changed_.wait(lock, [this] { return stopping_ || !items_.empty(); });
      changed_.wait_for(lock, kCheckEvery, [this] { return stopping_; });
      last = stopping_;
      lock.unlock();
      try {
        check();
      } catch (...) {  // out of memory: retry
      }
      lock.lock();
    }
  }

  // Queries devices, NCCL and the group without holding the lock.
  void check() {
    std::vector<std::pair<std::shared_ptr<Item>, std::optional<rpc::StreamPoint>>> items;
    {
      std::lock_guard lock(mutex_);
      for (const auto& item : items_) items.emplace_back(item, item->done);
    }
    for (const auto& [item, done] : items) {
      std::optional<base::Error> error;
      rpc::make_current(item->communicator->stream.device());
      try {
        if ((done && done->reached()) || item->set->failure()->error()) {
          forget(item);
          continue;
        }
        error = reason_to_end(*item);
      } catch (...) {  // the device has failed
        error = base::current_error(base::ErrorKind::kResources);
        error->rank = options_.world_rank;
        error->op = item->op;
      }
      if (!error) continue;
      item->set->end(*error);
      forget(item);
    }
  }

  std::optional<base::Error> reason_to_end(Item& item) const {
    if (auto lost = options_.lost()) return lost;
    const base::TimePoint now = base::Clock::now();
    if (std::unique_lock use(item.communicator->in_use, std::try_to_lock); use) {
      if (const auto text = item.communicator->nccl->failure()) {
        if (!item.nccl_failed) item.nccl_failed = now;
        if (now - *item.nccl_failed < options_.loss_grace) return std::nullopt;
        return base::Error{base::ErrorKind::kResources, "NCCL: " + *text, options_.world_rank,
                           item.op};
      }
    }
    if (options_.timeout.count() == 0 || now - item.since <= options_.timeout) return std::nullopt;
    return base::Error{base::ErrorKind::kDeadline,
                       "the deadline of an operation over NCCL passed: a rank that had agreed to "
                       "it did not do its part",
                       -1, item.op};
  }

  const Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Item>> items_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace distrain::cuda

#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <c10/core/Stream.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/base/executor.h"
#include "distrain/cuda/plugin.h"
#include "distrain/rpc/device.h"

namespace distrain::cuda {

/// Runs calls on detached threads, because they may never return from NCCL. Thread-safe.
class DetachedTasks : public std::enable_shared_from_this<DetachedTasks> {
 public:
  void run(base::Task task) noexcept;
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
struct DeviceCommunicator {
  DeviceCommunicator(std::unique_ptr<NcclCommunicator> nccl_in, c10::Stream stream_in,
                     std::shared_ptr<DetachedTasks> detached_in)
      : nccl(std::move(nccl_in)), stream(stream_in), detached(std::move(detached_in)) {}
  ~DeviceCommunicator() {
    detached->run([ended = std::move(nccl), device = stream.device()]() mutable {
      rpc::make_current(device);
      ended.reset();
    });
  }

  std::unique_ptr<NcclCommunicator> nccl;
  const c10::Stream stream;
  const std::shared_ptr<DetachedTasks> detached;
  std::mutex in_use;  // held for calls of `nccl`, except abort()
};

/// The error that ended a set's communicators, and whether a caller has received it. Thread-safe.
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
  /// Returns the error, if any, and marks it as reported to a caller.
  std::optional<base::Error> report() {
    std::lock_guard lock(mutex_);
    reported_ = reported_ || error_;
    return error_;
  }
  /// Returns the error if no caller of report() has received it.
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
  /// Returns the communicator of device `number` (numbered in the group), or null if there is none.
  std::shared_ptr<DeviceCommunicator> find(size_t number) const {
    std::lock_guard lock(mutex_);
    const auto it = communicators_.find(number);
    return it == communicators_.end() ? nullptr : it->second;
  }
  void add(size_t number, std::shared_ptr<DeviceCommunicator> communicator);

  /// Sets the set's error and aborts all communicators, without waiting for the aborts.
  void end(const base::Error& error);
  const std::shared_ptr<CommunicatorFailure>& failure() const { return failure_; }

 private:
  const std::shared_ptr<CommunicatorFailure> failure_ = std::make_shared<CommunicatorFailure>();
  mutable std::mutex mutex_;
  std::map<size_t, std::shared_ptr<DeviceCommunicator>> communicators_;
};

/// Watches work of NCCL in which other ranks may never take part. While there is such work, a
/// thread checks every few milliseconds whether the group has lost a rank, NCCL or the device has
/// failed, or the work is overdue. If so, the thread ends the communicators.
class Watchdog {
 public:
  struct Options {
    std::function<std::optional<base::Error>()> lost;  ///< returns the loss of a rank of the group
    std::chrono::milliseconds timeout;                 ///< time limit for the watched work; 0: none
    std::chrono::milliseconds loss_grace;              ///< NcclTimeouts::loss_grace
    int world_rank;                                    ///< this rank's number in the job
  };
  explicit Watchdog(Options options) : options_(std::move(options)) {}
  /// Checks the watched work one last time, then joins the thread.
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  struct Item;
  /// Watches operation `op` until the stream reaches the point that enqueued() sets. Call begin()
  /// before NCCL gets the operation.
  std::shared_ptr<Item> begin(std::shared_ptr<CommunicatorSet> set,
                              std::shared_ptr<DeviceCommunicator> communicator, std::string op);
  /// Sets the point in the stream at which NCCL's work for `item` ends.
  void enqueued(const std::shared_ptr<Item>& item, rpc::StreamPoint done);
  void forget(const std::shared_ptr<Item>& item) {
    std::lock_guard lock(mutex_);
    items_.remove(item);
  }

 private:
  void run() noexcept;
  void check();
  std::optional<base::Error> reason_to_end(Item& item) const;

  const Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Item>> items_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace distrain::cuda

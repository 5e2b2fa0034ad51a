#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include <c10/core/Stream.h>

#include "distrain/base/clock.h"
#include "distrain/base/error.h"
#include "distrain/cuda/plugin.h"
#include "distrain/rpc/device.h"

namespace distrain::cuda {

/// A communicator and the stream that its work goes into.
struct Lane {
  Lane(std::unique_ptr<NcclCommunicator> nccl_in, c10::Stream stream_in)
      : nccl(std::move(nccl_in)), stream(stream_in) {}
  const std::unique_ptr<NcclCommunicator> nccl;
  const c10::Stream stream;
  std::mutex in_use;  // NcclCommunicator's functions, but abort()
};

/// The communicators of a group, one for each device, which end together. Thread-safe.
class CommunicatorSet {
 public:
  /// Null if there is none yet. `number`: of the device among those that the group has met.
  std::shared_ptr<Lane> find(size_t number) const;
  void add(size_t number, std::shared_ptr<Lane> lane);

  /// Aborts all work under way, for good. The first error is kept.
  void end(const base::Error& error);
  std::optional<base::Error> error() const;

 private:
  mutable std::mutex mutex_;
  std::map<size_t, std::shared_ptr<Lane>> lanes_;
  std::optional<base::Error> error_;
};

/// Looks after work that NCCL was given and that other ranks may never take part in: a thread of
/// its own asks every few milliseconds, while there is such work, whether the group has lost a
/// rank, NCCL has failed or the work is overdue, and ends the communicators then.
class Watch {
 public:
  /// `failure`: of the group. A `timeout` of 0 is none.
  Watch(std::function<std::optional<base::Error>()> failure, std::chrono::milliseconds timeout);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  class Item;
  /// From before NCCL is called until `done` is reached.
  std::shared_ptr<Item> begin(std::shared_ptr<CommunicatorSet> set, std::shared_ptr<Lane> lane);
  /// NCCL's work ends at `done`.
  void enqueued(const std::shared_ptr<Item>& item, rpc::StreamPoint done);
  /// There will be no work.
  void forget(const std::shared_ptr<Item>& item);

 private:
  void run();
  void look();

  const std::function<std::optional<base::Error>()> failure_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Item>> items_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace distrain::cuda

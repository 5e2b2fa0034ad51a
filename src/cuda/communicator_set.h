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

/// Runs calls that NCCL may never return from on threads that nobody joins. Thread-safe.
class Aside : public std::enable_shared_from_this<Aside> {
 public:
  void run(base::Task task) noexcept;
  /// Returns when all has come back, or `limit` has passed.
  void wait_until(base::TimePoint limit);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_ = 0;
};

/// A communicator and the stream that its work goes into. Ended aside.
struct Lane {
  Lane(std::unique_ptr<NcclCommunicator> nccl_in, c10::Stream stream_in,
       std::shared_ptr<Aside> aside_in)
      : nccl(std::move(nccl_in)), stream(stream_in), aside(std::move(aside_in)) {}
  ~Lane() {
    aside->run([ended = std::move(nccl), device = stream.device()]() mutable {
      rpc::make_current(device);
      ended.reset();
    });
  }

  std::unique_ptr<NcclCommunicator> nccl;
  const c10::Stream stream;
  const std::shared_ptr<Aside> aside;
  std::mutex in_use;  // NcclCommunicator's functions, but abort()
};

/// Why a set's communicators ended before their work, and whether that was told. Thread-safe.
class Outcome {
 public:
  /// False if it has failed before: the first error is kept.
  bool fail(const base::Error& error);
  std::optional<base::Error> error() const;
  /// The error, for somebody who is told by it.
  std::optional<base::Error> tell();
  /// The error, if nobody has been told.
  std::optional<base::Error> untold() const;

 private:
  mutable std::mutex mutex_;
  std::optional<base::Error> error_;
  bool told_ = false;
};

/// The communicators of a group, one for each device, which end together. Thread-safe.
class CommunicatorSet {
 public:
  /// Null if there is none yet, or no more. `number`: of the device among those of the group.
  std::shared_ptr<Lane> find(size_t number) const;
  void add(size_t number, std::shared_ptr<Lane> lane);

  /// Aborts all work under way, for good; does not wait for that.
  void end(const base::Error& error);
  const std::shared_ptr<Outcome>& outcome() const { return outcome_; }

 private:
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  mutable std::mutex mutex_;
  std::map<size_t, std::shared_ptr<Lane>> lanes_;
};

/// Looks after work that NCCL was given and that other ranks may never take part in: a thread of
/// its own asks every few milliseconds, while there is such work, whether the group has lost a
/// rank, NCCL or the device has failed or the work is overdue, and ends the communicators then.
class Watch {
 public:
  struct Terms {
    std::function<std::optional<base::Error>()> lost;  ///< a rank of the group
    std::chrono::milliseconds timeout;                 ///< 0 is none
    /// NCCL may notice a loss first, but names nobody: how long the group has to name the rank.
    std::chrono::milliseconds loss_grace;
    int world_rank;  ///< this one
  };
  explicit Watch(Terms terms);
  /// After one last look.
  ~Watch();

  struct Item;
  /// From before NCCL is called until `done` is reached. `op`: for error messages.
  std::shared_ptr<Item> begin(std::shared_ptr<CommunicatorSet> set, std::shared_ptr<Lane> lane,
                              std::string op);
  /// NCCL's work ends at `done`.
  void enqueued(const std::shared_ptr<Item>& item, rpc::StreamPoint done);
  /// There will be no work.
  void forget(const std::shared_ptr<Item>& item);

 private:
  void run() noexcept;
  void look();
  std::optional<base::Error> reason_to_end(Item& item) const;

  const Terms terms_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Item>> items_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace distrain::cuda

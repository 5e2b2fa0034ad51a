#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/base/thread_pool.h"
#include "distrain/rpc/agent.h"
#include "distrain/rpc/torch_state.h"

namespace distrain::rpc {

/// Returns when `thread` has run or dropped all tasks that were posted before this call.
template <class Thread>
void wait_for_posted(Thread& thread) {
  base::Promise<void> promise;
  const base::Future<void> reached = promise.future();
  thread.post([promise = std::move(promise)]() mutable { promise.set(); });
  static_cast<void>(reached.wait_result());
}

/// The layers of an agent. Notifies them of lost ranks, on a thread of its own. Thread-safe.
class Layers {
 public:
  /// `before_each` runs before each notification, on the notifying thread.
  explicit Layers(std::function<void()> before_each = {})
      : notifier_("dt-lost", std::move(before_each)) {}
  /// Notifies `layer` of the ranks that are lost now and of later losses.
  void add(const std::weak_ptr<Layer>& layer) {
    std::lock_guard lock(mutex_);
    layers_.push_back(layer);
    for (const auto& [rank, loss] : losses_) notify_locked(layer, loss);
  }
  /// Notifies all layers, unless the loss is known: an ending agent reports every rank as lost.
  void on_rank_lost(const Loss& loss) {
    std::lock_guard lock(mutex_);
    if (!losses_.emplace(loss.rank, loss).second) return;
    for (const auto& layer : layers_) notify_locked(layer, loss);
  }
  /// Forgets the loss of `rank`, which now has a new process.
  void on_rank_returned(int rank) {
    std::lock_guard lock(mutex_);
    losses_.erase(rank);
  }
  void on_shutdown() {
    for (const auto& layer : living()) layer->on_shutdown();
  }
  /// Returns when the layers have been notified of all losses reported so far.
  void wait_until_notified() { wait_for_posted(notifier_); }
  bool is_notifying() const { return !notifier_.idle(); }
  bool notifies_here() const { return notifier_.runs_here(); }
  std::vector<Wait> waits() const {
    std::vector<Wait> waits;
    for (const auto& layer : living()) std::ranges::move(layer->waits(), std::back_inserter(waits));
    return waits;
  }

 private:
  std::vector<std::shared_ptr<Layer>> living() const {
    std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Layer>> all;
    for (const auto& known : layers_) {
      if (auto layer = known.lock()) all.push_back(std::move(layer));
    }
    return all;
  }
  void notify_locked(const std::weak_ptr<Layer>& layer, const Loss& loss) {
    notifier_.post([layer, loss] {
      const TorchStateGuard guard;
      if (const auto known = layer.lock()) known->on_rank_lost(loss);
    });
  }

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Layer>> layers_;
  std::map<int, Loss> losses_;   // by rank; only of ranks that are lost now
  base::SerialThread notifier_;  // not a worker, because all workers may be busy
};

}  // namespace distrain::rpc

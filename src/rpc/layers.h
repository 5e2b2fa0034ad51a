#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "distrain/base/future.h"
#include "distrain/base/serial_thread.h"
#include "distrain/rpc/layer.h"

namespace distrain::rpc {

/// Returns when `thread` has run, or dropped, all that was posted to it before.
template <class Thread>
void wait_for_posted(Thread& thread) {
  base::Promise<void> promise;
  const base::Future<void> reached = promise.future();
  thread.post([promise = std::move(promise)]() mutable { promise.set(); });
  static_cast<void>(reached.wait_result());
}

/// The layers that are built on an agent. Thread-safe.
class Layers {
 public:
  /// Calls `before_word` on the thread that tells the layers, before each loss.
  explicit Layers(std::function<void()> before_word = {})
      : teller_("dt-lost", std::move(before_word)) {}
  /// It is told of losses, earlier ones included.
  void add(const std::weak_ptr<Layer>& layer);
  /// Once for each rank: one that was lost is not lost again as its agent ends.
  void on_rank_lost(const Loss& loss);
  /// A new process has its place.
  void on_rank_returned(int rank);
  /// See Layer::on_shutdown().
  void on_shutdown();
  /// Returns when the layers have been told of all losses so far.
  void wait_until_told() { wait_for_posted(teller_); }
  /// Whether there are losses that they are yet to be told of.
  bool is_telling() const { return untold_ > 0; }
  /// Whether this thread is the one that tells them.
  bool tells_here() const { return teller_.runs_here(); }
  std::vector<Wait> waits() const;

 private:
  std::vector<std::shared_ptr<Layer>> living() const;
  void tell_locked(const std::weak_ptr<Layer>& layer, const Loss& loss);

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Layer>> layers_;
  std::map<int, Loss> losses_;  // of ranks that are gone now
  std::atomic<int> untold_{0};  // of a layer
  base::SerialThread teller_;   // the workers may all be busy
};

}  // namespace distrain::rpc

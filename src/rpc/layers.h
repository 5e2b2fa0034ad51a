#pragma once

#include <condition_variable>

#include "distrain/base/future.h"
#include "distrain/base/thread_pool.h"
#include "distrain/rpc/agent.h"

namespace distrain::rpc {

/// Returns when `thread` has run, or dropped, all tasks posted before.
template <class Thread>
void wait_for_posted(Thread& thread) {
  base::Promise<void> promise;
  const base::Future<void> reached = promise.future();
  thread.post([promise = std::move(promise)]() mutable { promise.set(); });
  static_cast<void>(reached.wait_result());
}

/// The layers of an agent. Notifies them of losses on a thread of its own. Thread-safe.
class Layers {
 public:
  /// Calls `before_each` on the notifying thread before each notification.
  explicit Layers(std::function<void()> before_each = {})
      : notifier_("dt-lost", std::move(before_each)) {}
  /// Notifies `layer` of losses, including earlier ones.
  void add(const std::weak_ptr<Layer>& layer) {
    std::lock_guard lock(mutex_);
    layers_.push_back(layer);
    for (const auto& [rank, loss] : losses_) notify_locked(layer, loss);
  }
  /// Notifies all layers, unless `loss.rank` is lost already; an agent that ends reports all ranks.
  void on_rank_lost(const Loss& loss) {
    std::lock_guard lock(mutex_);
    if (!losses_.emplace(loss.rank, loss).second) return;
    for (const auto& layer : layers_) notify_locked(layer, loss);
  }
  /// Forgets the loss of `rank`, which has a new process.
  void on_rank_returned(int rank) {
    std::lock_guard lock(mutex_);
    losses_.erase(rank);
  }
  void on_shutdown() {
    for (const auto& layer : living()) layer->on_shutdown();
  }
  /// Returns when the layers have been notified of all losses so far.
  void wait_until_notified() { wait_for_posted(notifier_); }
  /// Returns true if notifications of losses are outstanding.
  bool is_notifying() const { return outstanding_ > 0; }
  bool notifies_here() const { return notifier_.runs_here(); }
  std::vector<Wait> waits() const;

 private:
  std::vector<std::shared_ptr<Layer>> living() const;
  void notify_locked(const std::weak_ptr<Layer>& layer, const Loss& loss);

  mutable std::mutex mutex_;
  std::vector<std::weak_ptr<Layer>> layers_;
  std::map<int, Loss> losses_;       // of ranks that are lost now
  std::atomic<int> outstanding_{0};  // notifications that are outstanding
  base::SerialThread notifier_;      // not a worker, because all workers may be busy
};

class ChannelImpl final : public Channel {
 public:
  ChannelImpl(AgentCore& core, uint16_t number) : core_(core), number_(number) {}

  int rank() const override;
  int world_size() const override;
  std::shared_ptr<base::Tracer> tracer() const override;
  void set_handler(Handler handler) override;
  void send(int to, const ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
            std::shared_ptr<const void> keep_alive) override;

  /// Throws `overloaded` if too many messages wait for channels that are not open yet.
  void deliver(ChannelMessage message);
  void on_peer_lost(int rank, const base::Error& error);
  void on_peer_returned(int rank) {
    std::lock_guard lock(mutex_);
    std::erase_if(lost_, [rank](const auto& lost) { return lost.first == rank; });
  }
  std::vector<Wait> waits();

 private:
  // A handler runs without the lock; set_handler() waits until `running_` is 0.
  struct Leave {
    ChannelImpl* channel = nullptr;
    std::shared_ptr<Handler> handler;  // set_handler() may replace it meanwhile
    void operator()(Handler*) const noexcept {
      std::lock_guard lock(channel->mutex_);
      if (--channel->running_ == 0) channel->idle_.notify_all();
    }
  };
  using Running = std::unique_ptr<Handler, Leave>;
  Running enter_locked() {
    if (handler_) ++running_;
    return {handler_.get(), {this, handler_}};
  }

  AgentCore& core_;
  const uint16_t number_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::shared_ptr<Handler> handler_;
  bool handler_set_ = false;
  int running_ = 0;
  std::vector<ChannelMessage> early_;  // counted in early_messages of the core
  std::vector<std::pair<int, base::Error>> lost_;
};

}  // namespace distrain::rpc

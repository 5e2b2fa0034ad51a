#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "agent_core.h"
#include "distrain/rpc/channel.h"

namespace distrain::rpc {

class ChannelImpl final : public Channel {
 public:
  ChannelImpl(AgentCore& core, uint16_t number) : core_(core), number_(number) {}

  int rank() const override { return core_.options.rank; }
  int world_size() const override { return core_.world_size(); }
  std::shared_ptr<base::Tracer> tracer() const override { return core_.options.tracer; }
  bool shares_memory() const override { return core_.options.shared_memory; }
  std::string host_of(int rank) const override { return core_.peers.host_of(rank); }
  void set_handler(Handler handler) override;
  void send(int to, const ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
            std::shared_ptr<const void> keep_alive,
            std::shared_ptr<const net::Fd> descriptor) override;

  /// Handles or queues a message. Throws `overloaded` if too many messages wait for a handler.
  void deliver(ChannelMessage message);
  void on_peer_lost(int rank, const Error& error) {
    std::unique_lock lock(mutex_);
    lost_.emplace_back(rank, error);
    const Running handler = enter_locked();
    lock.unlock();
    if (handler && handler->on_peer_lost) handler->on_peer_lost(rank, error);
  }
  void on_peer_returned(int rank) {
    std::lock_guard lock(mutex_);
    std::erase_if(lost_, [rank](const auto& lost) { return lost.first == rank; });
  }
  std::vector<Wait> waits() {
    std::unique_lock lock(mutex_);
    const Running handler = enter_locked();
    lock.unlock();
    return handler && handler->waits ? handler->waits() : std::vector<Wait>();
  }

 private:
  // Marks a call of a handler as finished: set_handler() waits until no handler is running.
  struct Leave {
    ChannelImpl* channel = nullptr;
    std::shared_ptr<Handler> handler;  // held, because set_handler() may replace it
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
  std::vector<ChannelMessage> early_;  // counted in AgentCore::early_messages
  std::vector<std::pair<int, Error>> lost_;
};

}  // namespace distrain::rpc

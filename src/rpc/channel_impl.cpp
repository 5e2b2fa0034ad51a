#include "channel_impl.h"

#include <fmt/format.h>

namespace distrain::rpc {

static uint64_t cost_of(const ChannelMessage& message) {
  return kCallCost + message.payload.size();
}

void ChannelImpl::set_handler(Handler handler) {
  std::vector<ChannelMessage> early;
  std::vector<std::pair<int, Error>> lost;
  std::shared_ptr<Handler> next;
  if (handler.on_message) next = std::make_shared<Handler>(std::move(handler));
  {
    std::unique_lock lock(mutex_);
    handler_ = nullptr;
    // Until the new handler has got the earlier messages, deliver() queues new ones behind them.
    handler_set_ = next == nullptr;
    idle_.wait(lock, [this] { return running_ == 0; });
    early.swap(early_);
  }
  for (;;) {
    for (ChannelMessage& message : early) {
      core_.early_messages -= cost_of(message);
      if (next) next->on_message(std::move(message));
    }
    if (!next) return;
    early.clear();
    std::lock_guard lock(mutex_);
    if (early_.empty()) {
      handler_ = next;
      lost = lost_;  // on_peer_lost() reports later losses
      handler_set_ = true;
      break;
    }
    early.swap(early_);
  }
  if (!next->on_peer_lost) return;
  for (const auto& [rank, error] : lost) next->on_peer_lost(rank, error);
}

void ChannelImpl::deliver(ChannelMessage message) {
  std::unique_lock lock(mutex_);
  const Running handler = enter_locked();
  if (!handler) {
    if (handler_set_) return;
    const uint64_t cost = cost_of(message);
    const uint64_t before = core_.early_messages.fetch_add(cost);
    if (before > 0 && before + cost > core_.options.total_budget) {
      core_.early_messages -= cost;
      throw Exception(ErrorKind::kOverloaded,
                      fmt::format("messages wait for channel {}, which nobody has opened on rank "
                                  "{} yet, and others: more than {} MiB of them",
                                  number_, rank(), core_.options.total_budget >> 20));
    }
    early_.push_back(std::move(message));
    return;
  }
  lock.unlock();
  handler->on_message(std::move(message));
}

void ChannelImpl::send(int to, const ChannelTag& tag,
                       std::span<const std::span<const uint8_t>> pieces,
                       std::shared_ptr<const void> keep_alive,
                       std::shared_ptr<const net::Fd> descriptor) {
  if (to == rank()) {
    size_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.size();
    ChannelMessage message{
        to, tag, {}, core_.loop.buffers().allocate(bytes), std::move(descriptor)};
    if (!message.body) {
      throw Exception(ErrorKind::kResources,
                      "no memory for a message of " + std::to_string(bytes) + " bytes");
    }
    uint8_t* at = message.body->data;
    for (const auto& piece : pieces) at = std::copy(piece.begin(), piece.end(), at);
    message.payload = {message.body->data, bytes};
    return deliver(std::move(message));
  }
  net::OutFrame frame;
  frame.header = {.kind = wire::FrameKind::kOneway,
                  .channel = number_,
                  .call_id = tag.a,
                  .context_id = tag.b,
                  .autograd_id = tag.c};
  for (const auto& piece : pieces) {
    if (!piece.empty()) frame.payload.push_back(piece);
  }
  frame.keep_alive = std::move(keep_alive);
  frame.descriptor = std::move(descriptor);
  static_cast<void>(core_.send(to, std::move(frame)).value());
}

}  // namespace distrain::rpc

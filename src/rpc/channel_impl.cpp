#include "channel_impl.h"

#include <cstring>

namespace distrain::rpc {

namespace {

uint64_t cost_of(const ChannelMessage& message) { return kCallCost + message.payload.size(); }

}  // namespace

void ChannelImpl::set_handler(Handler handler) {
  std::vector<ChannelMessage> early;
  std::vector<std::pair<int, Error>> lost;
  std::shared_ptr<Handler> next;
  if (handler.on_message) next = std::make_shared<Handler>(std::move(handler));
  {
    std::unique_lock lock(mutex_);
    handler_ = nullptr;
    idle_.wait(lock, [this] { return running_ == 0; });
    early.swap(early_);
    // Until the early messages are delivered, new messages must be queued behind them.
    handler_set_ = next == nullptr;
  }
  if (!next) {
    for (const ChannelMessage& message : early) core_.early_messages -= cost_of(message);
    return;
  }
  for (;;) {
    for (ChannelMessage& message : early) {
      core_.early_messages -= cost_of(message);
      next->on_message(std::move(message));
    }
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
  if (next->on_peer_lost) {
    for (const auto& [rank, error] : lost) next->on_peer_lost(rank, error);
  }
}

ChannelImpl::Running ChannelImpl::enter_locked() {
  if (handler_) ++running_;
  return {handler_.get(), {this, handler_}};
}

void ChannelImpl::Leave::operator()(Handler*) const noexcept {
  std::lock_guard lock(channel->mutex_);
  if (--channel->running_ == 0) channel->idle_.notify_all();
}

void ChannelImpl::deliver(ChannelMessage message) {
  Running handler;
  {
    std::lock_guard lock(mutex_);
    handler = enter_locked();
    if (!handler) {
      if (handler_set_) return;
      const uint64_t cost = cost_of(message);
      const uint64_t before = core_.early_messages.fetch_add(cost);
      if (before > 0 && before + cost > core_.options.total_budget) {
        core_.early_messages -= cost;
        throw Exception(ErrorKind::kOverloaded,
                        "messages wait for channel " + std::to_string(number_) +
                            ", which nobody has opened on rank " + std::to_string(rank()) +
                            " yet, and others: more than " +
                            std::to_string(core_.options.total_budget >> 20) + " MiB of them");
      }
      early_.push_back(std::move(message));
      return;
    }
  }
  handler->on_message(std::move(message));
}

void ChannelImpl::on_peer_lost(int rank, const Error& error) {
  Running handler;
  {
    std::lock_guard lock(mutex_);
    lost_.emplace_back(rank, error);
    handler = enter_locked();
    if (!handler) return;
  }
  if (handler->on_peer_lost) handler->on_peer_lost(rank, error);
}

void ChannelImpl::on_peer_returned(int rank) {
  std::lock_guard lock(mutex_);
  std::erase_if(lost_, [rank](const auto& lost) { return lost.first == rank; });
}

std::vector<Wait> ChannelImpl::waits() {
  Running handler;
  {
    std::lock_guard lock(mutex_);
    handler = enter_locked();
    if (!handler) return {};
  }
  return handler->waits ? handler->waits() : std::vector<Wait>();
}

void ChannelImpl::send(int to, const ChannelTag& tag,
                       std::span<const std::span<const uint8_t>> pieces,
                       std::shared_ptr<const void> keep_alive) {
  if (to == rank()) {
    size_t bytes = 0;
    for (const auto& piece : pieces) bytes += piece.size();
    ChannelMessage message{to, tag, {}, core_.loop.buffers().allocate(bytes)};
    if (!message.body) {
      throw Exception(ErrorKind::kResources,
                      "no memory for a message of " + std::to_string(bytes) + " bytes");
    }
    uint8_t* at = message.body->data;
    for (const auto& piece : pieces) {
      if (piece.empty()) continue;
      std::memcpy(at, piece.data(), piece.size());
      at += piece.size();
    }
    message.payload = {message.body->data, bytes};
    deliver(std::move(message));
    return;
  }
  net::OutFrame frame;
  frame.header.kind = wire::FrameKind::kOneway;
  frame.header.channel = number_;
  frame.header.call_id = tag.a;
  frame.header.context_id = tag.b;
  frame.header.autograd_id = tag.c;
  for (const auto& piece : pieces) {
    if (!piece.empty()) frame.payload.push_back(piece);
  }
  frame.keep_alive = std::move(keep_alive);
  static_cast<void>(core_.send(to, std::move(frame)).value());
}

}  // namespace distrain::rpc

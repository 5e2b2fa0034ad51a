// Connects the ranks of a job in one process by a network that reorders messages between pairs.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/base/thread_state.h"
#include "distrain/rpc/channel.h"

namespace distrain::testing {

/// A network whose one loop thread delivers all messages in a random order that keeps the order of
/// each pair of ranks. The bytes of a message are read when it is delivered, not when it is sent,
/// as in a queued zero-copy send.
class FakeNetwork {
 public:
  explicit FakeNetwork(int size, uint32_t seed = 1) : random_(seed), handlers_(size_t(size)) {
    for (int rank = 0; rank < size; ++rank) {
      channels_.push_back(std::make_unique<FakeChannel>(*this, rank));
    }
    loop_ = std::thread([this] { loop(); });
  }
  ~FakeNetwork() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    loop_.join();
  }

  rpc::Channel& channel(int rank) { return *channels_[size_t(rank)]; }
  int size() const { return int(channels_.size()); }

  /// Holds messages from `from` to `to` back until release().
  void hold(int from, int to) {
    std::lock_guard lock(mutex_);
    held_.insert({from, to});
  }
  void release() {
    {
      std::lock_guard lock(mutex_);
      held_.clear();
    }
    changed_.notify_all();
  }
  /// Waits until all messages have been delivered, but not for the tasks that they start on
  /// executors. No message may be held back.
  void await_deliveries() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queues_.empty() && !is_delivering_; });
  }
  /// Notifies all other ranks that `rank` is lost. `cause` is the rank to blame, by default `rank`.
  void kill(int rank, int cause = -1) {
    {
      std::lock_guard lock(mutex_);
      causes_[rank] = cause < 0 ? rank : cause;
      lost_.insert(rank);
      std::erase_if(queues_, [rank](auto& queue) {
        return queue.first.first == rank || queue.first.second == rank;
      });
      for (int to = 0; to < size(); ++to) {
        if (!lost_.contains(to)) losses_.emplace_back(to, rank);
      }
    }
    changed_.notify_all();
  }
  /// Puts rank i on host `hosts[i]`. Ranks of different hosts share no memory.
  void put_on_hosts(std::vector<int> hosts) {
    hosts_ = std::move(hosts);
    for (int rank = 0; rank < size(); ++rank) isolate(rank);
  }
  /// Drops all later messages.
  void cut() { is_cut_ = true; }
  /// Makes `rank` share no memory.
  void isolate(int rank) { isolated_.insert(rank); }
  size_t messages() const {
    std::lock_guard lock(mutex_);
    return messages_;
  }

 private:
  struct Message {
    rpc::ChannelTag tag;
    std::vector<std::span<const uint8_t>> pieces;
    std::shared_ptr<const void> keep_alive;
    std::shared_ptr<const net::Fd> descriptor;
  };

  class FakeChannel final : public rpc::Channel {
   public:
    FakeChannel(FakeNetwork& network, int rank) : network_(network), rank_(rank) {}
    int rank() const override { return rank_; }
    int world_size() const override { return network_.size(); }
    std::string host_of(int rank) const override {
      return network_.hosts_.empty() ? "" : std::to_string(network_.hosts_[size_t(rank)]);
    }
    bool shares_memory() const override { return !network_.isolated_.contains(rank_); }
    void set_handler(Handler handler) override { network_.set_handler(rank_, std::move(handler)); }
    void send(int to, const rpc::ChannelTag& tag, std::span<const std::span<const uint8_t>> pieces,
              std::shared_ptr<const void> keep_alive,
              std::shared_ptr<const net::Fd> descriptor) override {
      network_.send(
          rank_, to,
          {tag, {pieces.begin(), pieces.end()}, std::move(keep_alive), std::move(descriptor)});
    }

   private:
    FakeNetwork& network_;
    const int rank_;
  };

  struct Handler {
    std::mutex running;
    bool set = false;
    rpc::Channel::Handler handler;
  };

  void set_handler(int rank, rpc::Channel::Handler handler) {
    Handler& slot = handlers_[size_t(rank)];
    {
      std::lock_guard running(slot.running);
      slot.handler = std::move(handler);
      slot.set = true;
    }
    {
      std::lock_guard lock(mutex_);
      has_handler_.insert(rank);
    }
    changed_.notify_all();
  }

  void send(int from, int to, Message message) {
    if (is_cut_) return;
    {
      std::lock_guard lock(mutex_);
      if (lost_.contains(to) || lost_.contains(from)) {
        throw base::Exception(base::Error{
            base::ErrorKind::kPeerLost, "rank " + std::to_string(to) + " is lost", to, {}});
      }
      queues_[{from, to}].push_back(std::move(message));
      ++messages_;
    }
    changed_.notify_all();
  }

  void loop() {
    base::thread_state().must_not_wait = true;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (!losses_.empty()) {
        const auto [to, rank] = losses_.front();
        const int cause = causes_[rank];
        losses_.pop_front();
        lock.unlock();
        tell_loss(to, rank, cause);
        lock.lock();
        continue;
      }
      const auto is_ready = [this](const auto& queue) {
        return !held_.contains(queue.first) && has_handler_.contains(queue.first.second);
      };
      // Take the first pair that is ready from a random one on.
      const auto rank = [this] { return int(random_() % uint32_t(size())); };
      const auto start = queues_.lower_bound({rank(), rank()});
      auto found = std::find_if(start, queues_.end(), is_ready);
      if (found == queues_.end()) {
        found = std::find_if(queues_.begin(), start, is_ready);
        if (found == start) {
          changed_.notify_all();  // for await_deliveries()
          changed_.wait(lock);
          continue;
        }
      }
      const auto pair = found->first;
      Message message = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) queues_.erase(found);
      is_delivering_ = true;
      lock.unlock();
      deliver(pair.first, pair.second, std::move(message));
      lock.lock();
      is_delivering_ = false;
    }
  }

  void deliver(int from, int to, Message message) {
    size_t size = 0;
    for (auto piece : message.pieces) size += piece.size();
    rpc::ChannelMessage received{
        from, message.tag, {}, pool_.allocate(size), std::move(message.descriptor)};
    size_t at = 0;
    for (auto piece : message.pieces) {
      if (!piece.empty()) std::memcpy(received.body->data + at, piece.data(), piece.size());
      at += piece.size();
    }
    received.payload = {received.body->data, size};
    message.keep_alive.reset();
    Handler& slot = handlers_[size_t(to)];
    std::lock_guard running(slot.running);
    if (slot.handler.on_message) slot.handler.on_message(std::move(received));
  }

  void tell_loss(int to, int rank, int cause) {
    Handler& slot = handlers_[size_t(to)];
    std::lock_guard running(slot.running);
    if (slot.handler.on_peer_lost) {
      slot.handler.on_peer_lost(
          rank,
          base::Error{
              base::ErrorKind::kPeerLost, "rank " + std::to_string(rank) + " is lost", cause, {}});
    }
  }

  base::BufferPool pool_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_;
  std::map<std::pair<int, int>, std::deque<Message>> queues_;  // none is empty
  std::deque<std::pair<int, int>> losses_;
  std::map<int, int> causes_;
  std::set<std::pair<int, int>> held_;
  std::set<int> lost_;
  std::set<int> isolated_;
  std::vector<int> hosts_;
  std::set<int> has_handler_;
  size_t messages_ = 0;
  bool is_delivering_ = false;
  bool stopping_ = false;
  std::atomic<bool> is_cut_ = false;
  std::vector<Handler> handlers_;
  std::vector<std::unique_ptr<FakeChannel>> channels_;
  std::thread loop_;
};

/// Like CHECK, for threads of run_ranks(). Two threads must not use Catch2's CHECK concurrently.
#define RANK_CHECK(...)                                                                 \
  do {                                                                                  \
    if (!(__VA_ARGS__)) {                                                               \
      throw std::runtime_error(std::string(__FILE__) + ":" + std::to_string(__LINE__) + \
                               ": failed: " #__VA_ARGS__);                              \
    }                                                                                   \
  } while (false)

/// Runs `body(rank)` for each rank on its own thread; rethrows the first failure.
inline void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> failures{size_t(size)};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, &failures, rank] {
      try {
        body(rank);
      } catch (...) {
        failures[size_t(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace distrain::testing

#pragma once

#include <cstdint>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "distrain/base/clock.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/message.h"

namespace distrain::rpc {

/// A call that has arrived but has not begun.
struct QueuedCall {
  int from = -1;
  uint32_t incarnation = 0;  ///< of the calling rank
  uint64_t id = 0;
  base::TimePoint arrived{};
  std::shared_ptr<InMessage> message{};  ///< set if this rank called itself
  net::InFrame frame{};                  ///< set if another rank called
  std::shared_ptr<DeviceReceive> device_receive{};
  uint64_t credit = 0;            ///< credit that the call took
  bool has_small_credit = false;  ///< from the credit for small calls
  bool is_given_up = false;       ///< the caller has given up: only release the call
  bool is_parked = false;         ///< waits until its caller has read more replies
};

/// Calls that wait for a thread, in order of arrival. If a rank does not read its replies, its
/// calls are parked in a queue of that rank. Thread-safe.
class CallQueue {
 public:
  void push(QueuedCall&& call) {
    std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    if (has_index_) add_to_index_locked(std::prev(calls_.end()));
  }
  /// Removes and returns the first call of a rank that is not `blocked`. Parks the calls before it.
  template <class F>
  std::optional<QueuedCall> pop(const F& blocked) {
    std::lock_guard lock(mutex_);
    while (!calls_.empty()) {
      const Position first = calls_.begin();
      const bool is_behind_others = !parked_.empty() && parked_.contains(first->from);
      if (!is_behind_others && !blocked(first->from)) return take_locked(first);
      first->is_parked = true;
      std::list<QueuedCall>& parked = parked_[first->from];
      parked.splice(parked.end(), calls_, first);
    }
    return std::nullopt;
  }
  /// Pops a parked call of `from` if that rank is not blocked. `second` is true if more are parked.
  template <class F>
  std::pair<std::optional<QueuedCall>, bool> pop_parked(int from, const F& blocked) {
    std::lock_guard lock(mutex_);
    const auto parked = parked_.find(from);
    if (parked == parked_.end() || blocked(from)) return {};
    std::optional<QueuedCall> call = take_locked(parked->second.begin());
    return {std::move(call), parked_.contains(from)};
  }
  /// Removes and returns the call `id` of rank `from`, if it is queued.
  std::optional<QueuedCall> take(int from, uint64_t id) {
    std::lock_guard lock(mutex_);
    if (!has_index_) {
      has_index_ = true;
      for (auto call = calls_.begin(); call != calls_.end(); ++call) add_to_index_locked(call);
      for (auto& [rank, parked] : parked_) {
        for (auto call = parked.begin(); call != parked.end(); ++call) add_to_index_locked(call);
      }
    }
    const auto position = index_[from].find(id);
    if (position == index_[from].end()) return std::nullopt;
    return take_locked(position->second);
  }
  void drop_all_of(int from) {
    std::list<QueuedCall> dropped;  // destroyed without the lock
    std::lock_guard lock(mutex_);
    for (auto next = calls_.begin(); next != calls_.end();) {
      const auto call = next++;
      if (call->from == from) dropped.splice(dropped.end(), calls_, call);
    }
    if (const auto parked = parked_.find(from); parked != parked_.end()) {
      dropped.splice(dropped.end(), parked->second);
      parked_.erase(parked);
    }
    index_.erase(from);
  }

 private:
  using Position = std::list<QueuedCall>::iterator;

  void add_to_index_locked(Position position) {
    index_[position->from].insert_or_assign(position->id, position);
  }

  std::optional<QueuedCall> take_locked(Position position) {
    std::optional<QueuedCall> call(std::move(*position));
    if (has_index_) {
      auto& positions = index_[call->from];
      const auto known = positions.find(call->id);
      // Compares positions, because a faulty peer may have used the same id for two calls.
      if (known != positions.end() && known->second == position) positions.erase(known);
    }
    std::list<QueuedCall>& queue = call->is_parked ? parked_[call->from] : calls_;
    queue.erase(position);
    if (call->is_parked && queue.empty()) parked_.erase(call->from);
    if (calls_.empty() && parked_.empty() && has_index_) {
      has_index_ = false;
      index_.clear();
    }
    return call;
  }

  std::mutex mutex_;
  std::list<QueuedCall> calls_;
  std::unordered_map<int, std::list<QueuedCall>> parked_;  // by rank; no list is empty
  // Positions by rank and call id. Built at the first cancellation; dropped when no call is queued.
  std::unordered_map<int, std::unordered_map<uint64_t, Position>> index_;
  bool has_index_ = false;
};

}  // namespace distrain::rpc

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

class Arrivals;

/// A call that has come and not begun.
struct QueuedCall {
  int from = -1;
  uint32_t incarnation = 0;  ///< of the rank that it comes from
  uint64_t id = 0;
  base::TimePoint arrived;
  std::shared_ptr<InMessage> message;  ///< of this rank to itself
  net::InFrame frame;                  ///< otherwise
  std::shared_ptr<Arrivals> arrivals;
  uint64_t credit = 0;       ///< that it took
  bool is_given_up = false;  ///< by its caller: only what it holds is to be let go
};

/// The calls that wait for a thread, in the order of their coming. Thread-safe.
class CallQueue {
 public:
  void push(QueuedCall&& call) {
    std::lock_guard lock(mutex_);
    if (spare_.empty()) {
      calls_.push_back(std::move(call));
    } else {
      spare_.front() = std::move(call);
      calls_.splice(calls_.end(), spare_, spare_.begin());
    }
    if (has_index_) add_to_index_locked(std::prev(calls_.end()));
  }
  std::optional<QueuedCall> pop() {
    std::lock_guard lock(mutex_);
    if (calls_.empty()) return std::nullopt;
    return take_locked(calls_.begin());
  }
  /// The call `id` of rank `from`, if it is there.
  std::optional<QueuedCall> take(int from, uint64_t id) {
    std::lock_guard lock(mutex_);
    if (!has_index_) {
      has_index_ = true;
      for (auto call = calls_.begin(); call != calls_.end(); ++call) add_to_index_locked(call);
    }
    const auto place = index_[from].find(id);
    if (place == index_[from].end()) return std::nullopt;
    return take_locked(place->second);
  }
  void drop_all_of(int from) {
    std::list<QueuedCall> dropped;  // die outside the lock
    std::lock_guard lock(mutex_);
    for (auto call = calls_.begin(); call != calls_.end();) {
      const auto next = std::next(call);
      if (call->from == from) dropped.splice(dropped.end(), calls_, call);
      call = next;
    }
    index_.erase(from);
  }

 private:
  using Place = std::list<QueuedCall>::iterator;
  static constexpr size_t kMaxSpare = 64;

  void add_to_index_locked(Place place) { index_[place->from].insert_or_assign(place->id, place); }

  std::optional<QueuedCall> take_locked(Place place) {
    std::optional<QueuedCall> call(std::move(*place));
    if (has_index_) {
      auto& places = index_[call->from];
      const auto known = places.find(call->id);
      // A peer may have given one id twice.
      if (known != places.end() && known->second == place) places.erase(known);
    }
    if (spare_.size() < kMaxSpare) {
      spare_.splice(spare_.begin(), calls_, place);
    } else {
      calls_.erase(place);
    }
    if (calls_.empty() && has_index_) {
      has_index_ = false;
      index_.clear();
    }
    return call;
  }

  std::mutex mutex_;
  std::list<QueuedCall> calls_;
  std::list<QueuedCall> spare_;  // empty ones, for those to come
  // By rank and id; made when the first call is cancelled, for as long as calls wait.
  std::unordered_map<int, std::unordered_map<uint64_t, Place>> index_;
  bool has_index_ = false;
};

}  // namespace distrain::rpc

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
  void push(QueuedCall call) {
    std::lock_guard lock(mutex_);
    calls_.push_back(std::move(call));
    const auto last = std::prev(calls_.end());
    places_[last->from].insert_or_assign(last->id, last);
  }
  std::optional<QueuedCall> pop() {
    std::lock_guard lock(mutex_);
    if (calls_.empty()) return std::nullopt;
    return take_locked(calls_.begin());
  }
  /// The call `id` of rank `from`, if it is there.
  std::optional<QueuedCall> take(int from, uint64_t id) {
    std::lock_guard lock(mutex_);
    const auto places = places_.find(from);
    if (places == places_.end()) return std::nullopt;
    const auto place = places->second.find(id);
    if (place == places->second.end()) return std::nullopt;
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
    places_.erase(from);
  }

 private:
  using Place = std::list<QueuedCall>::iterator;

  QueuedCall take_locked(Place place) {
    QueuedCall call = std::move(*place);
    auto& places = places_[call.from];
    // A peer may have given one id twice.
    if (const auto known = places.find(call.id); known != places.end() && known->second == place) {
      places.erase(known);
    }
    calls_.erase(place);
    return call;
  }

  std::mutex mutex_;
  std::list<QueuedCall> calls_;
  std::unordered_map<int, std::unordered_map<uint64_t, Place>> places_;  // by rank and id
};

}  // namespace distrain::rpc

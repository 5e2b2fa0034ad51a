#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

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
  }
  std::optional<QueuedCall> pop() {
    std::lock_guard lock(mutex_);
    if (calls_.empty()) return std::nullopt;
    std::optional<QueuedCall> first(std::move(calls_.front()));
    calls_.pop_front();
    return first;
  }
  /// Those that are not to be run any more.
  std::vector<QueuedCall> take(const std::function<bool(const QueuedCall&)>& which) {
    std::vector<QueuedCall> taken;
    std::lock_guard lock(mutex_);
    std::erase_if(calls_, [&](QueuedCall& call) {
      const bool is_it = which(call);
      if (is_it) taken.push_back(std::move(call));
      return is_it;
    });
    return taken;
  }

 private:
  std::mutex mutex_;
  std::deque<QueuedCall> calls_;
};

}  // namespace distrain::rpc

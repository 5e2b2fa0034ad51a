#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "distrain/base/clock.h"

namespace distrain::fake_network {

using base::Duration;
using base::TimePoint;

inline Duration seconds(double count) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(count));
}

/// A clock that stands still during an event and then jumps to the next event. Events of the same
/// time run in the order in which they were scheduled.
class VirtualTime {
 public:
  TimePoint now() const { return now_; }
  double seconds_since_start() const { return seconds_at(now_); }
  double seconds_at(TimePoint when) const {
    return std::chrono::duration<double>(when - kStart).count();
  }
  size_t pending() const { return events_.size(); }

  void at(TimePoint when, std::function<void()> what) {
    events_.push({std::max(when, now_), ++asked_, std::move(what)});
  }
  void after(Duration delay, std::function<void()> what) { at(now_ + delay, std::move(what)); }

  /// Runs the next event. Returns false if no event is due before `end`.
  bool run_next(TimePoint end = base::kNever) {
    if (events_.empty() || events_.top().when > end) return false;
    now_ = events_.top().when;
    const auto what = std::move(const_cast<Event&>(events_.top()).what);
    events_.pop();
    what();
    return true;
  }

 private:
  struct Event {
    TimePoint when;
    uint64_t number = 0;
    std::function<void()> what;
  };
  struct IsLater {
    bool operator()(const Event& a, const Event& b) const {
      return a.when != b.when ? a.when > b.when : a.number > b.number;
    }
  };

  // The start of virtual time. It is not zero, because a real monotonic clock is never zero.
  static constexpr TimePoint kStart{std::chrono::hours(1)};

  TimePoint now_ = kStart;
  uint64_t asked_ = 0;
  std::priority_queue<Event, std::vector<Event>, IsLater> events_;
};

}  // namespace distrain::fake_network

#pragma once

#include <algorithm>

#include <sched.h>

#include "distrain/base/clock.h"

namespace distrain::base {

/// Polling with sched_yield before a wait blocks, one object per thread.
///
/// Waking a thread on another, sleeping core costs 20 to 40 µs in a virtual machine: more than a
/// whole small call. So a wait first looks for up to `kWindow` whether its event has come, and
/// yields between the looks, so that on a busy core the thread that makes the event runs at once.
/// When a yield takes long the cores are busy and polling only takes time from others: it is then
/// switched off on this thread, for 20 ms first, doubling up to 1 s while that goes on.
class AdaptivePoll {
 public:
  static constexpr Duration kWindow = std::chrono::microseconds(50);
  static constexpr Duration kSlowYield = std::chrono::microseconds(100);
  static constexpr Duration kFirstPause = std::chrono::milliseconds(20);
  static constexpr Duration kLongestPause = std::chrono::seconds(1);

  /// True as soon as `done()` is; false when the window has passed or polling is switched off.
  template <class Done>
  bool poll(Done done) {
    if (done()) return true;
    TimePoint now = Clock::now();
    if (now < paused_until_) return false;
    for (const TimePoint end = now + kWindow; now < end;) {
      const TimePoint after = yield(now);
      if (done()) return true;
      if (after < paused_until_) return false;
      now = after;
    }
    return false;
  }

  /// Whether polling is switched on at `now`.
  bool allowed(TimePoint now) const { return now >= paused_until_; }

  /// One yield; returns the time after it and switches polling off when it took too long.
  TimePoint yield(TimePoint before) {
    sched_yield();
    const TimePoint after = Clock::now();
    if (after - before > kSlowYield) {
      paused_until_ = after + pause_;
      pause_ = std::min(pause_ * 2, kLongestPause);
    } else if (pause_ > kFirstPause) {
      pause_ -= pause_ / 1024;  // forgets a busy time within a few thousand quick yields
    }
    return after;
  }

 private:
  TimePoint paused_until_{};
  Duration pause_ = kFirstPause;
};

}  // namespace distrain::base

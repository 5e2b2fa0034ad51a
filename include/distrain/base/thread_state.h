#pragma once

#include <algorithm>

#include <sched.h>

#include "distrain/base/clock.h"

namespace distrain::base {

/// Polls with sched_yield() before a wait blocks; each thread has its own object.
///
/// Waking a thread on a sleeping core takes 20 to 40 µs in a virtual machine, longer than a small
/// call. So a wait first polls for up to `kWindow`, and yields between polls so that other threads
/// can run on this core. If a yield takes longer than `kSlowYield`, the cores are busy, so the
/// thread stops polling for 20 ms. Each further slow yield doubles that pause, up to 1 s.
class AdaptivePoll {
 public:
  static constexpr Duration kWindow = std::chrono::microseconds(50);
  static constexpr Duration kSlowYield = std::chrono::microseconds(100);
  static constexpr Duration kFirstPause = std::chrono::milliseconds(20);
  static constexpr Duration kLongestPause = std::chrono::seconds(1);
  /// Returns true as soon as `done()` does; false if the window passes or polling is paused.
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

  /// Returns true if polling is not paused at `now`.
  bool allowed(TimePoint now) const { return now >= paused_until_; }
  /// Yields once and returns the time afterwards; pauses polling if the yield took too long.
  TimePoint yield(TimePoint before) {
    sched_yield();
    const TimePoint after = Clock::now();
    if (after - before > kSlowYield) {
      paused_until_ = after + pause_;
      pause_ = std::min(pause_ * 2, kLongestPause);
    } else if (pause_ > kFirstPause) {
      pause_ -= pause_ / 1024;  // shrinks to kFirstPause within a few thousand quick yields
    }
    return after;
  }

 private:
  TimePoint paused_until_{};
  Duration pause_ = kFirstPause;
};

/// An object that is notified before a thread blocks and when it resumes, so that a pool can grow.
class BlockObserver {
 public:
  virtual ~BlockObserver() = default;
  virtual void on_block() = 0;  ///< may throw `overloaded`, which fails the wait
  virtual void on_unblock() = 0;
};

struct ThreadState {
  /// Set on the loop thread, where a wait would never end, so that check_may_wait() aborts.
  bool must_not_wait = false;
  BlockObserver* observer = nullptr;
  AdaptivePoll poll;
};

ThreadState& thread_state();
/// Aborts the process with a message that names `what` if this thread must not wait.
void check_may_wait(const char* what);

/// Notifies the thread's observer, if it has one, that the thread blocks while this object lives.
class BlockingScope {
 public:
  BlockingScope() : observer_(thread_state().observer) {
    if (observer_) observer_->on_block();
  }
  ~BlockingScope() {
    if (observer_) observer_->on_unblock();
  }
  BlockingScope(BlockingScope&&) = delete;

 private:
  BlockObserver* observer_;
};

}  // namespace distrain::base

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include <sched.h>

#include "distrain/base/clock.h"

namespace distrain::base {

/// An event loop that a thread can run while it polls, so that the thread itself receives what it
/// waits for. One thread at a time runs the loop.
class EventLoop {
 public:
  virtual ~EventLoop() = default;
  /// Returns true if this thread runs the loop until leave(); false if another thread runs it.
  virtual bool enter() = 0;
  /// Runs the callbacks of all events that are ready. Returns true if a message was among them and
  /// no other thread wants to run the loop, so that this thread should go on polling.
  virtual bool run_ready() = 0;
  virtual void leave() = 0;
};
using EventLoopPtr = std::shared_ptr<EventLoop>;

/// Polls with sched_yield() before a wait blocks; each thread has its own object.
///
/// Waking a thread on a sleeping core takes 20 to 40 µs in a virtual machine, longer than a small
/// call. So a wait first polls for up to `kWindow`, about as long as another rank takes for its
/// part of a small step, and yields between polls so that other threads can run on this core. If a
/// yield brings no progress and takes longer than `kSlowYield`, the cores are busy, so the thread
/// stops polling for 20 ms. Each further slow yield doubles that pause, up to 1 s.
class AdaptivePoll {
 public:
  static constexpr Duration kWindow = std::chrono::microseconds(200);
  static constexpr Duration kSlowYield = std::chrono::microseconds(300);
  static constexpr Duration kFirstPause = std::chrono::milliseconds(20);
  static constexpr Duration kLongestPause = std::chrono::seconds(1);

  /// Returns true as soon as `done()` does; false if the window passes or polling is paused. Runs
  /// `loop` between the yields unless another thread does. If that makes progress, polls for
  /// longer.
  template <class Done>
  bool poll(Done done, EventLoop* loop = nullptr) {
    if (done()) return true;
    TimePoint now = Clock::now();
    if (!allowed(now)) return false;
    polling_.fetch_add(1, std::memory_order_relaxed);
    bool runs_loop = false;
    bool is_done = false;
    for (TimePoint end = now + kWindow; !is_done && now < end && allowed(now);) {
      // Enters before the yield, so that a reply does not wake the loop's own thread.
      if (loop && !runs_loop) runs_loop = loop->enter();
      const TimePoint before = now;
      sched_yield();
      now = Clock::now();
      const Duration yielded = now - before;
      const bool has_received = runs_loop && loop->run_ready();
      if (runs_loop) now = Clock::now();  // callbacks take time
      if (has_received) end = now + kWindow;
      is_done = done();
      note_yield(yielded, has_received || is_done, now);
    }
    if (runs_loop) loop->leave();
    polling_.fetch_sub(1, std::memory_order_relaxed);
    return is_done;
  }

  /// Lets a thread that copies without a pause offer its core to threads that poll, which otherwise
  /// wait until the kernel's next tick, up to 4 ms. Does nothing if no thread of the process polls,
  /// or if other threads have kept the core for so long that polling is paused.
  void offer_core() {
    if (polling_.load(std::memory_order_relaxed) == 0) return;
    const TimePoint before = Clock::now();
    if (!allowed(before)) return;
    sched_yield();
    const TimePoint now = Clock::now();
    note_yield(now - before, false, now);
  }

  /// Returns true if polling is not paused at `now`.
  bool allowed(TimePoint now) const { return now >= paused_until_; }
  /// Pauses polling if a yield took too long and brought no progress.
  void note_yield(Duration yielded, bool has_progress, TimePoint now) {
    if (yielded > kSlowYield) {
      if (has_progress) return;
      paused_until_ = now + pause_;
      pause_ = std::min(pause_ * 2, kLongestPause);
    } else if (pause_ > kFirstPause) {
      pause_ -= pause_ / 1024;  // shrinks to kFirstPause within a few thousand quick yields
    }
  }

 private:
  static inline std::atomic<int> polling_{0};  // threads of the process in poll()
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
  /// Set while this thread runs callbacks of an event loop. A wait there would never end, so
  /// check_may_wait() aborts.
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

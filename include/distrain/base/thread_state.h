#pragma once

#include "distrain/base/adaptive_poll.h"

namespace distrain::base {

/// Notified when a thread is about to block and when it resumes, so that a pool can grow.
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
  BlockingScope(const BlockingScope&) = delete;
  BlockingScope& operator=(const BlockingScope&) = delete;

 private:
  BlockObserver* observer_;
};

}  // namespace distrain::base

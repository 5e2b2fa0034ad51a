#pragma once

#include "distrain/base/adaptive_poll.h"

namespace distrain::base {

/// Told by a wait that its thread is about to block and that it goes on. A pool grows by it.
class BlockObserver {
 public:
  virtual ~BlockObserver() = default;
  virtual void on_block() = 0;  ///< may throw `overloaded`: then the wait fails with it
  virtual void on_unblock() = 0;
};

/// What the runtime knows of the current thread.
struct ThreadState {
  /// Set on the loop thread: a wait there could never end, so it is a fatal error.
  bool must_not_wait = false;
  BlockObserver* observer = nullptr;
  AdaptivePoll poll;
};

ThreadState& thread_state();

/// Ends the process with a message if this thread must not wait.
void check_may_wait(const char* what);

/// Tells the thread's observer, if any, that it blocks while this object lives.
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

#pragma once

#include <cstdint>
#include <memory>

#include "distrain/base/buffer.h"
#include "distrain/base/clock.h"
#include "distrain/base/executor.h"

namespace distrain::net {

/// A thread that runs a libuv event loop for sockets and timers.
///
/// Thread model: functions whose names end in `_on_loop`, handlers of streams and listeners, and
/// posted and timed tasks run on this thread, one at a time, and must not block, throw or do tensor
/// work. All other functions of distrain::net are thread-safe.
///
/// After activity the loop polls for up to 50 µs before it blocks (see base::AdaptivePoll).
class Loop {
 public:
  Loop();
  /// Closes all streams and listeners without flushing them, then joins the thread. Stream and
  /// Listener objects may be destroyed after the loop.
  ~Loop();
  Loop(Loop&&) = delete;

  void post(base::Task task);
  /// Runs `task` at `when` or soon after; returns an id for cancel(), which has no effect if `task`
  /// has run. After cancel() on another thread than the loop's, `task` may still run.
  uint64_t call_at(base::TimePoint when, base::Task task);
  void cancel(uint64_t timer);

  bool in_loop() const;
  /// Returns the pool of receive buffers.
  base::BufferPool& buffers();

  struct Impl;  ///< the libuv state, private to src/net
  const std::shared_ptr<Impl>& impl() { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace distrain::net

#pragma once

#include <cstdint>
#include <memory>

#include "distrain/base/buffer.h"
#include "distrain/base/clock.h"
#include "distrain/base/executor.h"
#include "distrain/base/thread_state.h"

namespace distrain::net {

/// A libuv event loop for sockets and timers, and a thread that runs the loop unless a waiting
/// thread does (see base::EventLoop).
///
/// Thread model: functions whose names end in `_on_loop`, handlers of streams and listeners, and
/// posted and timed tasks run on the thread that runs the loop, one at a time, and must not block,
/// throw or do tensor work. All other functions of distrain::net are thread-safe.
class Loop {
 public:
  Loop();
  /// Closes all streams and listeners without flushing them, then joins the thread. Stream and
  /// Listener objects may be destroyed after the loop.
  ~Loop();
  Loop(Loop&&) = delete;

  void post(base::Task task);
  /// Runs `task` at `when` or soon after; returns an id for cancel(), which has no effect if `task`
  /// has run. After cancel() on a thread that does not run the loop, `task` may be running.
  uint64_t call_at(base::TimePoint when, base::Task task);
  void cancel(uint64_t timer);

  /// Returns true if this thread runs a callback of the loop.
  bool in_loop() const;
  base::EventLoopPtr event_loop() const;
  /// Returns the pool of receive buffers.
  base::BufferPool& buffers();

  struct Impl;  ///< the libuv state, private to src/net
  const std::shared_ptr<Impl>& impl() { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace distrain::net

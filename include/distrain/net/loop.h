#pragma once

#include <cstdint>
#include <memory>

#include "distrain/base/buffer.h"
#include "distrain/base/clock.h"
#include "distrain/base/executor.h"

namespace distrain::net {

/// The one thread of a process that waits for sockets and timers (libuv).
///
/// Thread model: everything whose name ends in `_on_loop`, every handler given to a Stream or a
/// Listener and every timed task runs on this thread, one at a time, and must not block, throw or
/// do tensor work. All other functions of this layer are thread-safe.
///
/// After activity it polls for up to 50 µs before it blocks (see base::AdaptivePoll).
class Loop {
 public:
  Loop();
  /// Closes all streams and listeners without flushing them, then ends the thread. What is left of
  /// those objects is harmless and may be destroyed later.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  void post(base::Task task);

  /// Runs `task` at `when` or soon after. Cancelling an id that has run is harmless. A timer that
  /// is cancelled on the loop does not run any more.
  uint64_t call_at(base::TimePoint when, base::Task task);
  void cancel(uint64_t timer);

  bool in_loop() const;

  /// Where streams take their receive buffers from.
  base::BufferPool& buffers();

  struct Impl;  ///< the libuv side, known to src/net only
  const std::shared_ptr<Impl>& impl() { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace distrain::net

#pragma once

#include <atomic>
#include <memory>

namespace distrain::base {

/// Device work that a thread has enqueued before it completed a future, and that may still run. A
/// thread that uses the future's value orders its own device work after this work.
class QueuedWork {
 public:
  virtual ~QueuedWork() = default;
  /// Orders device work that this thread enqueues from now on after this work. Does not block.
  virtual void precede_this_thread() const noexcept = 0;
};
using QueuedWorkPtr = std::shared_ptr<const QueuedWork>;

/// Returns the calling thread's device work that futures have to carry; null if there is none.
using FindQueuedWork = QueuedWorkPtr (*)() noexcept;

namespace detail {
// Global, because a future knows no agent and accelerators belong to the process.
inline constinit std::atomic<FindQueuedWork> find_queued_work{nullptr};
}  // namespace detail

/// Sets the function behind queued_work(). Called when a device is first used. Thread-safe.
inline void set_queued_work_finder(FindQueuedWork find) { detail::find_queued_work = find; }

/// Returns this thread's device work so far; null if no device is in use.
inline QueuedWorkPtr queued_work() {
  const FindQueuedWork find = detail::find_queued_work.load(std::memory_order_acquire);
  return find ? find() : nullptr;
}

}  // namespace distrain::base

#pragma once

#include <atomic>
#include <memory>

namespace distrain::base {

/// Work that the thread which completed a future has given to a device, and that the device may
/// not have done yet. Whoever uses the future's value puts its own work behind it.
class QueuedWork {
 public:
  virtual ~QueuedWork() = default;
  /// What this thread gives to devices from now on is done after it. Does not block.
  virtual void precede_this_thread() const noexcept = 0;
};
using QueuedWorkPtr = std::shared_ptr<const QueuedWork>;

/// Finds what of this thread's work others have to be told of; null if there is none.
using FindQueuedWork = QueuedWorkPtr (*)() noexcept;

namespace detail {
// A future knows no agent, and an accelerator belongs to a process.
inline constinit std::atomic<FindQueuedWork> find_queued_work{nullptr};
}  // namespace detail

/// For the layer that knows devices, when the first one is used. Thread-safe.
inline void set_queued_work_finder(FindQueuedWork find) { detail::find_queued_work = find; }

/// That of this thread. Null where no device is in use.
inline QueuedWorkPtr queued_work() {
  const FindQueuedWork find = detail::find_queued_work.load(std::memory_order_acquire);
  return find ? find() : nullptr;
}

}  // namespace distrain::base

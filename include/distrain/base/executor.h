#pragma once

#include <memory>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/base/queued_work.h"
#include "distrain/base/unique_function.h"

namespace distrain::base {

using Task = UniqueFunction<void()>;

/// Returns a task that orders its thread's device work after `work` (null: none) and runs `task`.
inline Task behind(QueuedWorkPtr work, Task task) {
  if (!work) return task;
  return [work = std::move(work), task = std::move(task)]() mutable {
    work->precede_this_thread();
    task();
    task = Task();
  };
}

/// Runs continuations and handlers. If shared pointers own an executor, a future that has one of
/// the executor's continuations keeps the executor alive until the future is done.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  virtual ~Executor() = default;

  /// Schedules `task` on a thread of this executor. Thread-safe; never throws.
  virtual void post(Task task) = 0;

  /// Schedules `task`, which uses a value that becomes valid when `work` is done.
  virtual void post_behind(QueuedWorkPtr work, Task task) {
    post(behind(std::move(work), std::move(task)));
  }

  /// Returns `task` wrapped with the thread-local state that it needs (the autograd context,
  /// torch's own). Called on the thread that registers a continuation.
  virtual Task bind(Task task) { return task; }

  /// Returns the exception that a continuation threw as an Error, of kind `otherwise` unless it is
  /// a base::Exception. Called in a catch block.
  virtual Error error_in_flight(ErrorKind otherwise) const { return current_error(otherwise); }
};

/// Runs each task at once on the thread that completes the future. For continuations of a few
/// instructions that take no lock.
class InlineExecutor final : public Executor {
 public:
  void post(Task task) override { task(); }
};

}  // namespace distrain::base

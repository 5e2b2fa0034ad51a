#pragma once

#include <memory>
#include <utility>

#include "distrain/base/error.h"
#include "distrain/base/queued_work.h"
#include "distrain/base/unique_function.h"

namespace distrain::base {

using Task = UniqueFunction<void()>;

/// `task`, which runs behind `work`; mostly there is none.
inline Task behind(QueuedWorkPtr work, Task task) {
  if (!work) return task;
  return [work = std::move(work), task = std::move(task)]() mutable {
    work->precede_this_thread();
    task();
    task = Task();
  };
}

/// Where continuations and handlers run. One that is owned by shared pointers lives as long as a
/// continuation of it waits for its value, which may be longer than its owner does.
class Executor : public std::enable_shared_from_this<Executor> {
 public:
  virtual ~Executor() = default;

  /// Runs `task` some time soon, on a thread of this executor. Thread-safe; never throws.
  virtual void post(Task task) = 0;

  /// The same, for a task that uses a value which is there when `work` is done.
  virtual void post_behind(QueuedWorkPtr work, Task task) {
    post(behind(std::move(work), std::move(task)));
  }

  /// Called on the thread that registers a continuation: gives back `task` wrapped with the
  /// thread-local state that has to travel with it (the autograd context, torch's own).
  virtual Task bind(Task task) { return task; }

  /// Inside a catch block: the exception that a continuation of this executor threw, of kind
  /// `otherwise` unless it is a base::Exception.
  virtual Error error_in_flight(ErrorKind otherwise) const { return current_error(otherwise); }
};

/// Runs a task at once on the thread that completes the future. For continuations that are a few
/// instructions long and take no lock.
class InlineExecutor final : public Executor {
 public:
  void post(Task task) override { task(); }
};

}  // namespace distrain::base

#pragma once

#include <functional>
#include <memory>
#include <string>

#include "distrain/base/executor.h"

namespace distrain::base {

/// Runs tasks one after the other, in the order of their posting, on a thread of its own, which is
/// started when first needed. Tasks may block, and must not throw.
class SerialThread final : public Executor {
 public:
  /// `name`: at most 15 characters. `before_task`, called before each task, must not throw.
  explicit SerialThread(std::string name, std::function<void()> before_task = {});
  /// Runs what is queued, then joins the thread. On the thread itself, in a task that held the last
  /// owner of this object, what is queued is run at once, and the thread ends after that task.
  ~SerialThread() override;
  SerialThread(const SerialThread&) = delete;
  SerialThread& operator=(const SerialThread&) = delete;

  /// A task that the system has no thread for is dropped.
  void post(Task task) override;

  /// Whether all tasks have run.
  bool idle() const;

  /// Whether this thread is the one that runs them.
  bool runs_here() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // the thread's, too
};

}  // namespace distrain::base

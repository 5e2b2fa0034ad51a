#pragma once

#include <functional>
#include <memory>
#include <string>

#include "distrain/base/executor.h"

namespace distrain::base {

/// Runs tasks one at a time, in posting order, on one thread, which the first post() starts. Tasks
/// may block and must not throw.
class SerialThread final : public Executor {
 public:
  /// `name` is truncated to 15 characters. `before_task` must not throw.
  explicit SerialThread(std::string name, std::function<void()> before_task = {});
  /// Runs the queued tasks, then joins the thread. If a task destroys this object on the thread
  /// itself, the destructor runs the queued tasks and the thread exits after that task.
  ~SerialThread() override;
  SerialThread(const SerialThread&) = delete;
  SerialThread& operator=(const SerialThread&) = delete;

  /// Drops `task` if the system cannot start the thread.
  void post(Task task) override;

  /// Returns true if all tasks have run.
  bool idle() const;

  /// Returns true if called on the thread that runs the tasks.
  bool runs_here() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the thread
};

}  // namespace distrain::base

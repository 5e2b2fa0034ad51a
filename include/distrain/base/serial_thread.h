#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "distrain/base/executor.h"

namespace distrain::base {

/// Runs tasks one after the other, in the order of their posting, on a thread of its own, which is
/// started when first needed. Tasks may block, and must not throw.
class SerialThread final : public Executor {
 public:
  explicit SerialThread(std::string name) : name_(std::move(name)) {}
  ~SerialThread() override;  ///< runs what is queued, then joins the thread
  SerialThread(const SerialThread&) = delete;
  SerialThread& operator=(const SerialThread&) = delete;

  /// A task that the system has no thread for is dropped.
  void post(Task task) override;

  /// Whether all tasks have run.
  bool idle() const;

  /// Whether this thread is the one that runs them.
  bool runs_here() const;

 private:
  void run();

  const std::string name_;  // for debuggers; at most 15 characters
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;  // the first one is running, if the thread is not waiting
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace distrain::base

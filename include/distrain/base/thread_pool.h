#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "distrain/base/executor.h"
#include "distrain/base/thread_state.h"

namespace distrain::base {

/// Threads that run tasks in the order of their posting, and that grow while tasks wait.
///
/// Nested and cyclic calls cannot deadlock it: a task that blocks (Future::wait tells through
/// BlockObserver) stops counting against `size`, so another thread takes the next task. At most
/// `cap` threads exist; a wait that would need one more fails with `overloaded`.
/// Threads are started when first needed. One beyond `size` ends as soon as it has nothing to do.
class ThreadPool final : public Executor, private BlockObserver {
 public:
  struct Options {
    std::string name = "distrain";  ///< of the threads, for debuggers; at most 15 characters
    int size = 4;                   ///< threads that may run, not counting those that wait
    int cap = 512;                  ///< threads that may exist
    std::function<void()> on_thread_start = {};  ///< run first by each; must not throw
    std::function<void()> before_task = {};      ///< run before each task; must not throw
    std::function<void()> after_task = {};       ///< run after each task; must not throw
  };

  explicit ThreadPool(Options options);
  ~ThreadPool() override;  ///< as stop()

  void post(Task task) override;

  /// Runs what is queued, then ends and joins all threads. Tasks posted later are dropped.
  void stop();

  /// Threads that exist now.
  int threads() const;

  /// Whether this thread is one of them.
  bool runs_here() const { return thread_state().observer == this; }

 private:
  void run();
  void on_block() override;
  void on_unblock() override;
  bool start_thread_locked();
  void wake_locked();
  bool wants_thread_locked() const;

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<Task> queue_;
  std::vector<std::thread> finished_;  // ended on their own, to be joined
  std::vector<std::thread> threads_;
  // Threads that wait for work. The last to come is the first to go: what it worked on lately, and
  // what libraries keep for each thread, is still in its caches.
  struct Idle {
    std::condition_variable wake;
    bool woken = false;
  };
  std::vector<Idle*> idle_;
  size_t coming_ = 0;  // woken, but not there yet
  int alive_ = 0;
  int blocked_ = 0;  // inside a BlockingScope
  bool stopping_ = false;
  // One thread that has just worked looks for more for a moment before it blocks (AdaptivePoll):
  // calls tend to come one after the other.
  bool polling_ = false;
  std::atomic<bool> called_{false};  // there is a task for the polling thread
};

}  // namespace distrain::base

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <semaphore.h>

#include "distrain/base/executor.h"
#include "distrain/base/thread_state.h"

namespace distrain::base {

/// A thread pool that starts tasks in posting order and grows while tasks block.
///
/// Nested and cyclic calls cannot deadlock the pool: a thread that blocks (Future::wait reports it
/// to the BlockObserver) does not count against `size`, so another thread takes the next task. At
/// most `cap` threads exist; if all of them would block, the wait fails with `overloaded`. Threads
/// start when first needed. A thread beyond `size` exits when it has no task.
class ThreadPool final : public Executor, private BlockObserver {
 public:
  struct Options {
    std::string name = "distrain";  ///< name of each thread; truncated to 15 characters
    int size = 4;                   ///< maximum number of threads that are not blocked
    int cap = 512;                  ///< maximum number of threads, blocked or not
    std::function<void()> on_thread_start = {};  ///< run first on each thread; must not throw
    std::function<void()> before_task = {};      ///< run before each task; must not throw
    std::function<void()> after_task = {};       ///< run after each task; must not throw
  };

  explicit ThreadPool(Options options);
  ~ThreadPool() override;  ///< calls stop()

  void post(Task task) override;
  /// Runs the queued tasks, then ends and joins all threads. Drops tasks that are posted later.
  void stop();
  /// Lets a thread that polls for its next task run `loop`. Must be called before the first post().
  void set_event_loop(EventLoopPtr loop) { loop_ = std::move(loop); }
  /// Returns the number of threads that exist.
  int threads() const;
  /// Returns true if called on a thread of this pool.
  bool runs_here() const { return thread_state().observer == this; }

 private:
  void run();
  void on_block() override;
  void on_unblock() override;
  bool start_thread_locked();
  struct Idle;
  Idle* take_idle_locked();
  bool wants_thread_locked() const;

  const Options options_;
  EventLoopPtr loop_;
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<Task> queue_;
  std::vector<std::thread> finished_;  // threads that have exited but are not joined yet
  std::vector<std::thread> threads_;
  // An idle thread. The pool first wakes the thread that became idle last, because that thread's
  // working set is still in its core's caches. A condition variable would take two more system
  // calls and two more switches, because the woken thread would wait for the mutex of its waker.
  struct Idle {
    Idle() { sem_init(&wake, 0, 0); }
    ~Idle() { sem_destroy(&wake); }
    Idle(Idle&&) = delete;
    sem_t wake;
  };
  std::vector<Idle*> idle_;
  size_t coming_ = 0;  // threads that were woken but do not run yet
  int alive_ = 0;
  int blocked_ = 0;  // threads inside a BlockingScope
  bool stopping_ = false;
  // True while a thread that has just run a task polls for the next task before it blocks (see
  // AdaptivePoll), because the next task is often posted at once.
  bool polling_ = false;
  std::atomic<bool> called_{false};  // a task is queued for the polling thread
};

/// Runs tasks one at a time, in posting order, on one thread, which the first post() starts. Tasks
/// may block and must not throw.
class SerialThread final : public Executor {
 public:
  /// `name` is truncated to 15 characters. `before_task` must not throw.
  explicit SerialThread(std::string name, std::function<void()> before_task = {});
  /// Runs the queued tasks, then joins the thread. If a task destroys this object on that thread,
  /// the destructor runs the other queued tasks, and the thread exits after the destroying task.
  ~SerialThread() override;
  SerialThread(SerialThread&&) = delete;
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

#include "distrain/base/thread_pool.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <list>
#include <system_error>

#include <pthread.h>

namespace distrain::base {

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

void check_may_wait(const char* what) {
  if (!thread_state().must_not_wait) return;
  std::fprintf(stderr,
               "distrain: fatal: %s in a callback of the event loop, where it could never end\n",
               what);
  std::abort();
}

ThreadPool::ThreadPool(Options options) : options_(std::move(options)) {}
ThreadPool::~ThreadPool() { stop(); }

// Returns true if a queued task needs one more thread, and `size` and `cap` allow it.
bool ThreadPool::wants_thread_locked() const {
  return queue_.size() > coming_ && idle_.empty() && alive_ - blocked_ < options_.size &&
         alive_ < options_.cap;
}

// Starts a thread. Returns false if that fails; the existing threads then run the queued tasks.
bool ThreadPool::start_thread_locked() {
  ++alive_;
  try {
    threads_.emplace_back([this] { run(); });
    return true;
  } catch (const std::system_error&) {
    --alive_;
    return false;
  }
}

void ThreadPool::post(Task task) {
  std::unique_lock lock(mutex_);
  if (stopping_) return;
  queue_.push_back(std::move(task));
  if (polling_) {
    // The polling thread checks the queue once more when polling ends, so it cannot miss this task.
    called_.store(true, std::memory_order_release);
  } else if (!idle_.empty()) {
    if (coming_ > 0) return;  // the coming thread wakes another if more tasks are queued
    Idle* const idle = take_idle_locked();
    lock.unlock();
    sem_post(&idle->wake);
  } else if (wants_thread_locked() && !start_thread_locked() && alive_ == 0) {
    // No thread will ever run the task: destroy it outside the lock, which cancels its promise.
    task = std::move(queue_.back());
    queue_.pop_back();
  }
}

// Returns the thread that became idle last, which the caller must wake.
ThreadPool::Idle* ThreadPool::take_idle_locked() {
  Idle* const idle = idle_.back();
  idle_.pop_back();
  ++coming_;
  return idle;
}

void ThreadPool::run() {
  pthread_setname_np(pthread_self(), options_.name.substr(0, 15).c_str());
  thread_state().observer = this;
  if (options_.on_thread_start) options_.on_thread_start();
  bool has_worked = false;
  std::unique_lock lock(mutex_);
  for (;;) {
    while (queue_.empty() && !stopping_) {
      // Exit if more than `size` threads can run, because a blocked thread has resumed.
      if (alive_ - blocked_ > options_.size) goto leave;
      if (has_worked && !polling_) {
        has_worked = false;
        polling_ = true;
        called_.store(false, std::memory_order_relaxed);
        lock.unlock();
        thread_state().poll.poll([this] { return called_.load(std::memory_order_acquire); },
                                 loop_.get());
        lock.lock();
        polling_ = false;
        continue;
      }
      Idle idle;
      idle_.push_back(&idle);
      lock.unlock();
      while (sem_wait(&idle.wake) != 0) {  // interrupted by a signal
      }
      lock.lock();
      --coming_;
    }
    if (queue_.empty()) break;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    // Several tasks may have been queued before this thread ran, so another thread may be needed.
    // Each thread wakes at most one, because a thread woken by each post() would preempt its waker.
    const bool wakes = !queue_.empty() && !idle_.empty() && coming_ == 0 && !polling_;
    Idle* const next = wakes ? take_idle_locked() : nullptr;
    if (wants_thread_locked()) start_thread_locked();
    lock.unlock();
    if (next) sem_post(&next->wake);
    if (options_.before_task) options_.before_task();
    task();
    task = Task();  // destroys its captures outside the lock
    if (options_.after_task) options_.after_task();
    has_worked = true;
    lock.lock();
  }
leave:
  --alive_;
  const auto self = std::ranges::find(threads_, std::this_thread::get_id(), &std::thread::get_id);
  if (self != threads_.end()) {
    finished_.push_back(std::move(*self));
    threads_.erase(self);
  }
  ended_.notify_all();
}

void ThreadPool::on_block() {
  std::vector<std::thread> done;
  {
    std::lock_guard lock(mutex_);
    if (alive_ >= options_.cap && blocked_ + 1 >= alive_) {
      throw Exception(ErrorKind::kOverloaded,
                      "all " + std::to_string(options_.cap) + " worker threads wait for a reply");
    }
    ++blocked_;
    if (wants_thread_locked() && !start_thread_locked() && blocked_ == alive_) {
      --blocked_;
      throw Exception(ErrorKind::kOverloaded, "the system has no thread for one more that waits");
    }
    done.swap(finished_);
  }
  for (std::thread& thread : done) thread.join();
}

void ThreadPool::on_unblock() {
  std::lock_guard lock(mutex_);
  --blocked_;
}

void ThreadPool::stop() {
  std::vector<std::thread> done;
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    while (!idle_.empty()) sem_post(&take_idle_locked()->wake);
    ended_.wait(lock, [this] { return alive_ == 0; });
    done.swap(finished_);
  }
  for (std::thread& thread : done) thread.join();
}

int ThreadPool::threads() const {
  std::lock_guard lock(mutex_);
  return alive_;
}

struct SerialThread::State {
  // Runs all queued tasks but the first `running` ones. A task stays queued while it runs.
  void run_queued(std::unique_lock<std::mutex>& lock, size_t running) {
    while (queue.size() > running) {
      const auto task = std::next(queue.begin(), static_cast<std::ptrdiff_t>(running));
      lock.unlock();
      if (before_task) before_task();
      (*task)();
      *task = Task();  // destroys its captures before idle() returns true
      lock.lock();
      queue.erase(task);
    }
  }

  std::string name;
  std::function<void()> before_task;
  std::mutex mutex;
  std::condition_variable changed;
  std::list<Task> queue;  // the first task is running, unless the thread waits
  bool stopping = false;
  std::thread thread;
};

SerialThread::SerialThread(std::string name, std::function<void()> before_task)
    : state_(std::make_shared<State>()) {
  state_->name = name.substr(0, 15);
  state_->before_task = std::move(before_task);
}

SerialThread::~SerialThread() {
  const bool is_here = runs_here();
  {
    std::unique_lock lock(state_->mutex);
    state_->stopping = true;
    if (is_here) state_->run_queued(lock, 1);
  }
  state_->changed.notify_all();
  if (is_here) {
    state_->thread.detach();
  } else if (state_->thread.joinable()) {
    state_->thread.join();
  }
}

void SerialThread::post(Task task) {
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->thread.joinable()) {
      try {
        state_->thread = std::thread([state = state_] {
          pthread_setname_np(pthread_self(), state->name.c_str());
          std::unique_lock lock(state->mutex);
          do {
            state->changed.wait(lock, [&] { return state->stopping || !state->queue.empty(); });
            state->run_queued(lock, 0);
          } while (!state->stopping);
        });
      } catch (const std::system_error&) {
        return;  // `task` is destroyed outside the lock, which cancels its promise
      }
    }
    state_->queue.push_back(std::move(task));
  }
  state_->changed.notify_all();
}

bool SerialThread::idle() const {
  std::lock_guard lock(state_->mutex);
  return state_->queue.empty();
}

bool SerialThread::runs_here() const {
  std::lock_guard lock(state_->mutex);
  return state_->thread.get_id() == std::this_thread::get_id();
}

}  // namespace distrain::base

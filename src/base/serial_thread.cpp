#include "distrain/base/serial_thread.h"

#include <condition_variable>
#include <cstddef>
#include <iterator>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>

namespace distrain::base {

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

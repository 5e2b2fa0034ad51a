#include "distrain/base/serial_thread.h"

#include <system_error>
#include <utility>

#include <pthread.h>

namespace distrain::base {

SerialThread::~SerialThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void SerialThread::post(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      try {
        thread_ = std::thread([this] { run(); });
      } catch (const std::system_error&) {
        return;  // `task` dies outside the lock, and its promise is cancelled
      }
    }
    queue_.push_back(std::move(task));
  }
  changed_.notify_all();
}

bool SerialThread::idle() const {
  std::lock_guard lock(mutex_);
  return queue_.empty();
}

bool SerialThread::runs_here() const {
  std::lock_guard lock(mutex_);
  return thread_.get_id() == std::this_thread::get_id();
}

void SerialThread::run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    // A task stays in the queue while it runs, so that idle() tells of it.
    Task& task = queue_.front();
    lock.unlock();
    task();
    task = Task();  // what it held goes before idle() tells
    lock.lock();
    queue_.pop_front();
  }
}

}  // namespace distrain::base

#include "distrain/autograd/parameter_lock.h"

#include "distrain/base/thread_state.h"

namespace distrain::autograd {

void ParameterLock::lock_shared() {
  std::unique_lock lock(mutex_);
  if (writing_ || (waiting_writers_ > 0 && blocked_readers_ == 0)) {
    lock.unlock();
    const base::BlockingScope waits;
    lock.lock();
    const uint64_t before = writes_;
    ++waiting_readers_;
    changed_.wait(lock, [&] {
      return !writing_ && (waiting_writers_ == 0 || blocked_readers_ > 0 || writes_ != before);
    });
    --waiting_readers_;
    if (writes_ != before) --readers_due_;
    ++readers_;
    lock.unlock();  // before the end of `waits`, which may take it
    return;
  }
  ++readers_;
}

void ParameterLock::unlock_shared() {
  std::lock_guard lock(mutex_);
  if (--readers_ == 0) changed_.notify_all();
}

void ParameterLock::lock() {
  std::unique_lock lock(mutex_);
  const auto is_free = [this] { return !writing_ && readers_ == 0 && readers_due_ == 0; };
  if (!is_free()) {
    lock.unlock();
    const base::BlockingScope waits;
    lock.lock();
    ++waiting_writers_;
    changed_.wait(lock, is_free);
    --waiting_writers_;
    writing_ = true;
    lock.unlock();
    return;
  }
  writing_ = true;
}

void ParameterLock::unlock() {
  std::lock_guard lock(mutex_);
  writing_ = false;
  ++writes_;
  readers_due_ = waiting_readers_;
  changed_.notify_all();
}

void ParameterLock::add_blocked_readers(int change) {
  std::lock_guard lock(mutex_);
  blocked_readers_ += change;
  changed_.notify_all();
}

}  // namespace distrain::autograd

#include "frame_writer.h"

#include <cerrno>

#include "distrain/base/thread_state.h"

namespace distrain::net {
namespace {

// Bytes after which a thread stops to write frames of others, and the loop serves other sockets.
constexpr size_t kWriteTurn = size_t{1} << 20;

}  // namespace

void FrameWriter::set_socket(int fd, size_t slice, bool offers_core) {
  std::lock_guard lock(mutex_);
  fd_ = fd;
  slice_ = slice;
  offers_core_ = offers_core;
  loop_writes_ = !queue_.empty();
}

std::optional<bool> FrameWriter::push(std::unique_ptr<PendingFrame>&& frame) {
  std::lock_guard lock(mutex_);
  if (refuses_) return std::nullopt;
  queue_.push_back(std::move(frame));
  if (is_writing_ || loop_writes_) return false;
  is_writing_ = true;
  return true;
}

void FrameWriter::write(PendingFrame* own, bool may_stay) {
  PendingFrame* frame = own;
  base::Task when_empty;
  for (size_t of_others = 0;;) {
    const bool is_full = frame->write_to(fd_, slice_) != 0;  // the loop reports an error
    std::unique_ptr<PendingFrame> done;                      // destroyed without the lock
    std::lock_guard lock(mutex_);
    if (!stopped_) {
      if (frame->done()) {
        done = pop_locked();
        if (frame == own) own = nullptr;
      }
      frame = queue_.empty() ? nullptr : queue_.front().get();
      if (frame && !is_full) {
        if (!own) of_others += frame->bytes_left();
        if (own ? may_stay : of_others <= kWriteTurn) continue;
      }
    }
    is_writing_ = false;
    left_.notify_all();
    if (stopped_) return;
    if (!frame) when_empty = std::move(when_empty_);
    loop_writes_ = frame != nullptr;
    break;
  }
  if (frame) wake_loop_();
  if (when_empty) when_empty();
}

int FrameWriter::drain_on_loop() {
  base::Task when_empty;
  for (size_t written = 0;;) {
    std::unique_ptr<PendingFrame> done;  // destroyed without the lock
    PendingFrame* front = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (is_writing_ || stopped_ || fd_ < 0) return 0;  // the writer wakes the loop
      if (!queue_.empty() && queue_.front()->done()) done = pop_locked();
      if (!queue_.empty()) front = queue_.front().get();  // only the loop takes frames away now
      loop_writes_ = front != nullptr;
      if (!front) when_empty = std::move(when_empty_);
    }
    if (!front) break;
    if (written >= kWriteTurn) return EAGAIN;
    const size_t before = front->bytes_left();
    const int code = front->write_to(fd_, slice_);
    if (code != 0) return code;
    written += before - front->bytes_left();
    if (offers_core_) base::thread_state().poll.offer_core();
  }
  if (when_empty) when_empty();
  return 0;
}

void FrameWriter::refuse() {
  std::lock_guard lock(mutex_);
  refuses_ = true;
}

bool FrameWriter::empty() const {
  std::lock_guard lock(mutex_);
  return queue_.empty();
}

void FrameWriter::call_when_empty(base::Task task) {
  {
    std::lock_guard lock(mutex_);
    if (stopped_) return;
    if (!queue_.empty()) {
      when_empty_ = std::move(task);
      return;
    }
  }
  task();
}

void FrameWriter::stop_on_loop() {
  decltype(queue_) dropped;  // destroyed without the lock, as `task`
  base::Task task;
  std::unique_lock lock(mutex_);
  refuses_ = stopped_ = true;
  left_.wait(lock, [this] { return !is_writing_; });
  dropped.swap(queue_);
  task = std::move(when_empty_);
}

}  // namespace distrain::net

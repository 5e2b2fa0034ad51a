#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "net_impl.h"

namespace distrain::net {

/// The frames that wait to be written to one socket, in order. A thread that sends writes its frame
/// itself, without the lock, if no other thread writes; the loop writes what the socket does not
/// take and what other threads queue meanwhile. Functions with `_on_loop` run on the loop of the
/// socket; all others are thread-safe.
class FrameWriter {
 public:
  /// `wake_loop` must make the loop call drain_on_loop(). Until set_socket() is called, all
  /// frames wait.
  explicit FrameWriter(std::function<void()> wake_loop) : wake_loop_(std::move(wake_loop)) {}
  /// Writes to `fd` from now on, in pieces of `slice` bytes, between which stop_on_loop() may end
  /// it and, if `offers_core`, the loop offers its core to other threads.
  void set_socket(int fd, size_t slice, bool offers_core = false);
  /// Queues `frame`. Returns true if the caller must then call write(). After refuse() returns
  /// nullopt and leaves `frame`.
  std::optional<bool> push(std::unique_ptr<PendingFrame>&& frame);
  /// Writes `own`, for which push() has returned true, and a few small frames behind it. If not
  /// `may_stay`, writes one piece of it.
  void write(PendingFrame* own, bool may_stay);
  /// Writes up to about 1 MiB. Returns 0 if nothing is left, EAGAIN if the loop must call it again
  /// when the socket is writable, or another errno.
  int drain_on_loop();
  /// Refuses further frames.
  void refuse();
  bool empty() const;
  /// Calls `task`, maybe at once, when all frames are written. Not called after stop_on_loop().
  void call_when_empty(base::Task task);
  /// Refuses further frames, waits until no thread writes, for one piece at most, and drops all.
  void stop_on_loop();

 private:
  std::unique_ptr<PendingFrame> pop_locked() {
    std::unique_ptr<PendingFrame> frame = std::move(queue_.front());
    queue_.pop_front();
    return frame;
  }

  const std::function<void()> wake_loop_;
  mutable std::mutex mutex_;
  std::deque<std::unique_ptr<PendingFrame>> queue_;
  int fd_ = -1;  // as slice_, does not change while a thread writes
  size_t slice_ = 0;
  bool offers_core_ = false;
  bool refuses_ = false;
  bool stopped_ = false;
  bool is_writing_ = false;  // a thread that has sent writes the first frame
  bool loop_writes_ = true;  // all others queue
  base::Task when_empty_;
  std::condition_variable left_;  // signalled when is_writing_ becomes false
};

}  // namespace distrain::net

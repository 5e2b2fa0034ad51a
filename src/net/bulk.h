#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include <uv.h>

#include "net_impl.h"

namespace distrain::net {

// Note [Bulk connections]
//
// A large payload that finds no room in shared memory travels over a connection of its own, so that
// small frames wait neither in the kernel's queue behind the payload nor for the thread that copies
// it. A rank opens its bulk connection to a peer when it sends the first such payload there. The
// payloads of one direction follow each other without headers, in the order of their frames, whose
// headers and metadata go over the stream as always. All bulk connections of a process belong to a
// second event loop, whose thread does nothing else. The thread that sends a payload writes too.
//
// A frame without its payload has its place in the order of the stream: it overtakes no frame. The
// receiving stream holds it until its payload has come, and meanwhile delivers later frames, except
// those that must follow it: a message of the same channel; a kCancel, which has no effect before
// its call; a kRRefDelete, which must not precede the call that creates the value; and kLeave,
// after which the end of the stream is no loss. All else may overtake. Calls and replies run in any
// order on the receiver's workers. Credit is counted in totals. kRRefFork and kRRefAccept have no
// relation to messages before them. The loop handles autograd's messages before calls that are
// still queued, so these may overtake calls. Tensors of devices do not use bulk connections.
//
// A stream that loses its bulk connection ends. A stream whose peer has closed ends when the last
// payload has come.

/// One end of a bulk connection, on the loop to which open() gives it. Functions with `_on_loop`
/// run on that loop; all others are thread-safe.
class BulkSocket : public LoopResource, public std::enable_shared_from_this<BulkSocket> {
 public:
  /// Called on the loop, once, if the connection breaks.
  using OnBroken = std::function<void(const base::Error&)>;
  explicit BulkSocket(OnBroken on_broken) : on_broken_(std::move(on_broken)) {}
  ~BulkSocket() override {
    if (fd_ >= 0) ::close(fd_);  // the loop has ended before it began
  }
  /// Begins to use `socket`. Returns false if there is a socket already.
  bool open(Loop& loop, Fd socket);
  /// Drops what is not sent or received.
  void close();
  void shut_down_on_loop() override;

 protected:
  virtual void on_ready_on_loop() = 0;
  virtual int wanted_events_locked() const = 0;
  virtual void drop_on_loop() = 0;
  void watch_later() {
    loop_->post([self = shared_from_this()] { self->watch_on_loop(); });
  }
  void break_on_loop(const base::Error& error);
  void break_later(const base::Error& error) {
    loop_->post([self = shared_from_this(), error] { self->break_on_loop(error); });
  }

  mutable std::mutex mutex_;
  std::shared_ptr<Loop::Impl> loop_;  // by mutex_ until it is set
  int fd_ = -1;                       // by mutex_; does not change while is_writing_
  bool is_tcp_ = false;               // set with fd_
  bool closed_ = false;               // by mutex_
  bool is_writing_ = false;           // by mutex_
  std::condition_variable left_;      // signalled when is_writing_ becomes false

 private:
  void watch_on_loop();  // calls on_ready_on_loop() for the events that are wanted now

  OnBroken on_broken_;  // loop only, as the rest
  uv_poll_t poll_;
  bool is_polled_ = false;
  bool is_shut_down_ = false;
};

/// Writes payloads.
class BulkSender final : public BulkSocket {
 public:
  using BulkSocket::BulkSocket;
  void push(std::unique_ptr<PendingFrame> payload) {
    std::lock_guard lock(mutex_);
    if (!closed_) queue_.push_back(std::move(payload));
  }
  /// Writes as far as the socket takes it, until `own` is written. The loop writes the rest.
  void write_until(const PendingFrame* own);
  /// Lets the loop write.
  void write_later() {
    std::lock_guard lock(mutex_);
    if (loop_ && !closed_) watch_later();
  }
  bool empty() const {
    std::lock_guard lock(mutex_);
    return queue_.empty() && !is_writing_;
  }
  /// Calls `task` when all payloads are written, at once if they are. Not called after close().
  void call_when_empty(base::Task task);

 private:
  void on_ready_on_loop() override { write_until(nullptr); }
  int wanted_events_locked() const override {
    return queue_.empty() || is_writing_ ? 0 : UV_WRITABLE;  // a writer watches later
  }
  void drop_on_loop() override;

  std::deque<std::unique_ptr<PendingFrame>> queue_;  // by mutex_; is_writing_ protects the first
  base::Task when_empty_;                            // by mutex_
};

/// Receives payloads.
class BulkReceiver final : public BulkSocket {
 public:
  using BulkSocket::BulkSocket;
  /// Receives the next `bytes`, and calls `done` with them on the loop.
  void expect(uint64_t bytes, std::function<void(base::BufferPtr)> done);
  base::TimePoint last_heard() const {
    std::lock_guard lock(mutex_);
    return last_heard_;
  }

 private:
  struct Payload {
    uint64_t bytes = 0;
    std::function<void(base::BufferPtr)> done;
    base::BufferPtr body = nullptr;  // allocated when its first byte can be read
    uint64_t filled = 0;
  };
  void on_ready_on_loop() override;
  int wanted_events_locked() const override { return queue_.empty() ? 0 : UV_READABLE; }
  void drop_on_loop() override;

  std::deque<Payload> queue_;   // by mutex_; only the loop uses and removes the first
  base::TimePoint last_heard_;  // by mutex_
};

}  // namespace distrain::net

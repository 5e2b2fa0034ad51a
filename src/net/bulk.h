#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include <uv.h>

#include "frame_writer.h"
#include "net_impl.h"

namespace distrain::net {

// Note [Bulk connections]
//
// A large payload that finds no room in shared memory travels over a connection of its own, so that
// small frames wait neither in the kernel's queue behind the payload nor for the thread that copies
// it. A rank opens its bulk connection to a peer when it sends the first such payload there. The
// payloads of one direction follow each other without headers, in the order of their frames, whose
// headers and metadata go over the stream as always. All bulk connections of a process belong to a
// second event loop, whose thread does nothing else and preempts no other. The sending thread also
// writes, as to a stream.
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
// A stream that loses its bulk connection ends; a rank that cannot open one reports its peer as
// unreachable. A stream whose peer has closed ends when the last payload has come.

/// One end of a bulk connection. The stream's loop calls open() and close(); functions with
/// `_on_loop` run on the loop that open() gets.
class BulkSocket : public LoopResource, public std::enable_shared_from_this<BulkSocket> {
 public:
  /// Called on the bulk loop, once, if the connection breaks.
  using OnBroken = std::function<void(const base::Error&)>;
  explicit BulkSocket(OnBroken on_broken) : on_broken_(std::move(on_broken)) {}
  /// Begins to use `socket`. Returns false if there is a socket already.
  bool open(Loop& loop, Fd socket);
  bool has_socket() const { return loop_ != nullptr; }
  /// Drops the payloads that are not sent or not received.
  void close();
  void shut_down_on_loop() override;

 protected:
  virtual void begin_on_loop() = 0;
  virtual void on_ready_on_loop(int events) = 0;
  virtual void drop_on_loop() = 0;  // also called if there is no loop
  void watch_on_loop(int events);
  void break_on_loop(const base::Error& error);
  int fd() const { return socket_.get(); }

  std::shared_ptr<Loop::Impl> loop_;  // set by open(), before other threads use it, as is_tcp_
  bool is_tcp_ = false;

 private:
  OnBroken on_broken_;
  Fd socket_;
  uv_poll_t poll_;
  bool is_polled_ = false;
  int watched_ = 0;  // events
  bool is_shut_down_ = false;
};

/// Writes payloads.
class BulkSender final : public BulkSocket {
 public:
  using BulkSocket::BulkSocket;
  FrameWriter& writer() { return writer_; }

 private:
  void begin_on_loop() override;
  void on_ready_on_loop(int events) override;
  void drop_on_loop() override { writer_.stop_on_loop(); }
  void wake() {
    const std::weak_ptr<BulkSocket> weak = weak_from_this();
    loop_->post([weak] {
      if (const auto self = weak.lock()) static_cast<BulkSender&>(*self).on_ready_on_loop(0);
    });
  }

  FrameWriter writer_{[this] { wake(); }};
};

/// Receives payloads.
class BulkReceiver final : public BulkSocket {
 public:
  using BulkSocket::BulkSocket;
  /// Receives the next `bytes`, and calls `done` with them on the bulk loop. Called on the stream's
  /// loop.
  void expect(uint64_t bytes, std::function<void(base::BufferPtr)> done);
  base::TimePoint last_heard() const { return last_heard_; }

 private:
  struct Payload {
    uint64_t bytes = 0;
    std::function<void(base::BufferPtr)> done;
    base::BufferPtr body = nullptr;  // allocated when its first byte can be read
    uint64_t filled = 0;
  };
  void begin_on_loop() override { watch_on_loop(UV_READABLE); }
  void on_ready_on_loop(int events) override;
  void drop_on_loop() override;

  std::mutex mutex_;
  std::deque<Payload> queue_;  // by mutex_; only the bulk loop uses and removes the first
  std::atomic<base::TimePoint> last_heard_{};
};

}  // namespace distrain::net

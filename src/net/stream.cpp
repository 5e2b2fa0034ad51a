#include "distrain/net/stream.h"

#include <algorithm>
#include <deque>

#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <uv.h>

#include "bulk.h"
#include "frame_reader.h"
#include "frame_writer.h"
#include "net_impl.h"

namespace distrain::net {
namespace {

constexpr auto kLongestLinger = std::chrono::seconds(1);  // for the peer's end: linger_on_loop()
// Bytes that a thread writes at once, and that the loop reads before it serves other streams.
constexpr size_t kSlice = size_t{1} << 20;
// The loop thread copies no larger payload into shared memory.
constexpr size_t kMostCopiedOnLoop = size_t{256} << 10;
// By default about 200 KB, which wakes the writer's loop often. At most net.core.wmem_max.
constexpr int kUnixSendBuffer = 1 << 20;
// Bytes of frames that wait for a payload in bulk, beyond which the stream reads no more.
constexpr size_t kMostWaiting = size_t{64} << 20;
constexpr size_t kCostOfWaiting = 1024;  // memory of such a frame beside its bytes, about

base::Error closed_here() {
  return base::Error{base::ErrorKind::kCancelled, "closed on this side"};
}

// Chunks are received into memory from which a device can copy, so they need the socket.
bool is_for_arena(const wire::FrameHeader& header) {
  return header.payload_bytes >= kLeastInArena && header.kind != wire::FrameKind::kChunk;
}

class SocketStream final : public Stream,
                           public LoopResource,
                           public std::enable_shared_from_this<SocketStream> {
 public:
  SocketStream(std::shared_ptr<Loop::Impl> loop, int fd) : loop_(std::move(loop)), socket_(fd) {
    writer_.set_socket(fd, kSlice);
    // A broken connection has no peer's address by which to tell.
    is_tcp_ = socket_option(fd, SOL_SOCKET, SO_DOMAIN) != AF_UNIX;
    if (is_tcp_) {
      const SocketName name = remote_name(fd);
      peer_name_ = name.host.empty() ? "a lost peer" : name.host + ":" + std::to_string(name.port);
      set_socket_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
      set_socket_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
      if (name.host == local_name(fd).host || is_loopback(name.host)) avoid_bbr(fd);
    } else {
      set_socket_option(fd, SOL_SOCKET, SO_SNDBUF, kUnixSendBuffer);
    }
  }
  void start(Handler handler, const wire::Limits& limits) override {
    if (loop_->in_loop()) {
      // At once, because the caller may replace them before the stream is open.
      set_handler_on_loop(std::move(handler));
      set_limits_on_loop(limits);
      loop_->hold_on_loop(shared_from_this());  // a loop that stops before that finishes it
      loop_->post([self = shared_from_this()] { self->open_on_loop(); });
      return;
    }
    loop_->post([self = shared_from_this(), handler = std::move(handler), limits]() mutable {
      self->set_handler_on_loop(std::move(handler));
      self->set_limits_on_loop(limits);
      self->open_on_loop();
    });
  }

  void set_limits_on_loop(const wire::Limits& limits) override {
    loop_->assert_in_loop();
    reader_.limits = limits;
  }

  void set_handler_on_loop(Handler handler) override {
    loop_->assert_in_loop();
    handler_ = std::make_shared<Handler>(std::move(handler));
  }

  base::Status send(OutFrame frame) override {
    if (const base::Status fits = check_limits(frame); !fits.ok()) return fits;
    if (!takes_descriptors_) frame.descriptor = nullptr;
    auto pending = make_pending(std::move(frame));
    if (auto in_bulk = pending->take_bulk()) {
      return send_both(std::move(pending), std::move(in_bulk));
    }
    PendingFrame* const own = pending.get();
    const std::optional<bool> writes = writer_.push(std::move(pending));
    if (!writes) return closed_error();
    if (*writes) writer_.write(own, !loop_->in_loop());
    return base::Unit{};
  }

  void close(bool flush) override {
    writer_.refuse();
    is_closing_ = true;  // now, because the peer may close once it has read all
    loop_->post([self = shared_from_this(), flush] {
      flush ? self->flush_on_loop() : self->shut_down_on_loop();
    });
  }

  base::TimePoint last_heard_on_loop() const override {
    // A busy loop reads late. Unread bytes of a stream that has paused may be older than a loss.
    int unread = 0;
    if ((watched_ & UV_READABLE) != 0) ioctl(socket_.get(), FIONREAD, &unread);
    if (unread > 0) return base::Clock::now();
    return bulk_receiver_ ? std::max(reader_.last_heard, bulk_receiver_->last_heard())
                          : reader_.last_heard;
  }
  const std::string& peer_name() const override { return peer_name_; }
  void share_memory_on_loop(uint64_t bytes) override {
    loop_->assert_in_loop();
    reader_.takes_descriptors = takes_descriptors_ = !is_tcp_;
    if (!is_tcp_) arena_bytes_ = bytes;
  }
  void use_bulk_on_loop(base::Task open) override {
    loop_->assert_in_loop();
    const auto on_broken = [weak = weak_from_this(), loop = loop_](const base::Error& error) {
      loop->post([weak, error] {
        if (const auto self = weak.lock()) self->lost_bulk_on_loop(error);
      });
    };
    bulk_receiver_ = std::make_shared<BulkReceiver>(on_broken);
    std::lock_guard lock(mutex_);
    bulk_sender_ = std::make_shared<BulkSender>(on_broken);
    open_bulk_ = std::move(open);
  }
  void send_bulk_on_loop(Loop& loop, Fd socket) override {
    if (bulk_sender_) bulk_sender_->open(loop, std::move(socket));
  }
  bool receive_bulk_on_loop(Loop& loop, Fd socket) override {
    return bulk_receiver_ && bulk_receiver_->open(loop, std::move(socket));
  }
  Fd take_socket_on_loop() override {
    handler_ = std::make_shared<Handler>();
    writer_.stop_on_loop();
    if (opened_ && !finished_) uv_poll_stop(&poll_);
    Fd taken = std::move(socket_);
    finish_on_loop(closed_here());
    return taken;
  }
  std::optional<uint32_t> peer_user_on_loop() override {
    loop_->assert_in_loop();
    return finished_ ? std::nullopt : peer_user(socket_.get());
  }
  void shut_down_on_loop() override {
    finish_on_loop(base::Error{base::ErrorKind::kCancelled, "this side is closing"});
  }

 private:
  std::string peer_text() const { return is_tcp_ ? peer_name_ : "the other process"; }
  base::Error peer_closed(int code) const {
    return {base::ErrorKind::kPeerLost,
            peer_text() +
                (code == 0 ? " closed the connection" : std::string(": ") + uv_strerror(-code))};
  }

  // ---- sending ----

  std::unique_ptr<PendingFrame> make_pending(OutFrame frame) {
    frame.header.payload_bytes = frame.payload_bytes();
    if (!is_for_arena(frame.header)) return std::make_unique<PendingFrame>(std::move(frame));
    std::shared_ptr<SendArena> arena;
    bool has_bulk = false;
    {
      std::lock_guard lock(mutex_);
      arena = send_arena_;
      has_bulk = bulk_sender_ != nullptr;
    }
    if (frame.header.payload_bytes > kMostCopiedOnLoop && loop_->in_loop()) arena = nullptr;
    return std::make_unique<PendingFrame>(std::move(frame), arena.get(), has_bulk);
  }

  // Sends a frame and its payload in bulk, each in the same place of its order.
  base::Status send_both(std::unique_ptr<PendingFrame> frame,
                         std::unique_ptr<PendingFrame> payload) {
    PendingFrame* const own = frame.get();
    PendingFrame* const own_payload = payload.get();
    std::shared_ptr<BulkSender> bulk;
    std::optional<bool> writes, writes_payload;
    {
      std::lock_guard lock(mutex_);
      bulk = bulk_sender_;
      if (bulk) writes = writer_.push(std::move(frame));
      if (!writes) return closed_error();
      writes_payload = bulk->writer().push(std::move(payload));
      if (open_bulk_) loop_->post(std::move(open_bulk_));
    }
    const bool may_stay = !loop_->in_loop();
    if (*writes) writer_.write(own, may_stay);
    if (writes_payload.value_or(false)) bulk->writer().write(own_payload, may_stay);
    return base::Unit{};
  }

  static base::Error closed_error() {
    return {base::ErrorKind::kPeerLost, "the connection is closed"};
  }

  // Writes the queue as far as the socket takes it, and goes on when it is writable again.
  void drain_on_loop() {
    if (write_failed_ || finished_ || !opened_) return;
    const int code = writer_.drain_on_loop();
    if (code != 0 && code != EAGAIN) return write_failed_on_loop(peer_closed(code));
    watch_on_loop(code == EAGAIN);
  }

  // Closes when all frames are written.
  void flush_on_loop() {
    if (!opened_ || finished_) return;
    const auto self = shared_from_this();
    writer_.call_when_empty([self, bulk = bulk_sender_] {
      base::Task linger = [self] { self->loop_->post([self] { self->linger_on_loop(); }); };
      std::unique_lock(self->mutex_).unlock();  // send_both() queues the payload of each header
      bulk ? bulk->writer().call_when_empty(std::move(linger)) : linger();
    });
  }

  // Lets the loop call back when the socket is readable, and when it is `writable`.
  void watch_on_loop(bool writable) {
    const bool readable = !ended_ && waiting_bytes_ <= kMostWaiting;
    const int events = (readable ? UV_READABLE : 0) | (writable ? UV_WRITABLE : 0);
    watches_writable_ = writable;
    if (!opened_ || finished_ || events == std::exchange(watched_, events)) return;
    uv_poll_start(&poll_, events, [](uv_poll_t* handle, int status, int seen) noexcept {
      static_cast<SocketStream*>(handle->data)->on_ready_on_loop(status, seen);
    });
  }

  void on_ready_on_loop(int status, int events) {
    const auto self = shared_from_this();  // a handler may let go of the stream
    const bool has_error = status < 0;     // then libuv has stopped the handle; reading says which
    if (has_error) watched_ = 0;
    if (has_error || (events & UV_READABLE)) read_on_loop();
    if (has_error || (events & UV_WRITABLE)) drain_on_loop();
    watch_on_loop(watches_writable_);
  }

  // The peer reads no more. Its last bytes may say why, so the stream ends when they are read.
  void write_failed_on_loop(const base::Error& error) {
    if (ended_ || std::exchange(write_failed_, true)) return;
    watch_on_loop(false);
    writer_.stop_on_loop();
    linger_timer_ =
        loop_->call_at(base::Clock::now() + kLongestLinger, [self = shared_from_this(), error] {
          // A late loop runs timers before it polls sockets; between two tasks it polls.
          self->loop_->post(
              [self, error] { self->loop_->post([self, error] { self->finish_on_loop(error); }); });
        });
  }

  // Closing a TCP socket with unread bytes would reset the connection and drop unsent bytes. So
  // shut down one direction, and discard input until the peer closes its own or kLongestLinger has
  // passed.
  void linger_on_loop() {
    if (discarding_ || finished_ || write_failed_) return;
    if (ended_) return finish_on_loop(closed_here());
    discarding_ = true;
    drop_unfinished_on_loop();
    ::shutdown(socket_.get(), SHUT_WR);
    linger_timer_ =
        loop_->call_at(base::Clock::now() + kLongestLinger,
                       [self = shared_from_this()] { self->finish_on_loop(closed_here()); });
  }

  // Returns true if this side has closed the stream, and its last frame is written.
  bool has_sent_all() const {
    return is_closing_ && !write_failed_ && writer_.empty() &&
           (!bulk_sender_ || bulk_sender_->writer().empty());
  }

  // ---- receiving ----

  void open_on_loop() {
    if (finished_) {  // closed before it was started
      const std::shared_ptr<Handler> handler = std::exchange(handler_, std::make_shared<Handler>());
      if (handler->on_close) handler->on_close(closed_here());
      return;
    }
    reader_.last_heard = base::Clock::now();
    loop_->scratch_on_loop();  // allocates here, because a callback of libuv must not throw
    loop_->hold_on_loop(shared_from_this());
    if (const int code = uv_poll_init(&loop_->uv, &poll_, socket_.get()); code < 0) {
      return finish_on_loop(peer_closed(-code));
    }
    poll_.data = this;
    opened_ = true;
    watch_on_loop(false);
    drain_on_loop();  // what was sent before
    if (is_closing_) flush_on_loop();
  }

  template <class F>
  void guard_on_loop(F run) {
    try {
      run();
    } catch (...) {
      finish_on_loop(base::current_error(base::ErrorKind::kInternal));
    }
  }

  void read_on_loop() {
    if (finished_ || ended_) return;
    guard_on_loop([this] {
      const std::optional<int> code = reader_.read(*loop_, socket_.get(), kSlice);
      if (!code || finished_) return;
      base::Error end = has_sent_all() ? closed_here() : peer_closed(*code);
      // An orderly peer has opened its bulk connection and written all payloads.
      const bool may_come = !waiting_.empty() && *code == 0 && bulk_receiver_->has_socket();
      if (!may_come) return finish_on_loop(std::move(end));
      ended_ = std::move(end);
    });
  }

  void deliver_on_loop(InFrame frame) {
    if (frame.header.kind == wire::FrameKind::kArena) return take_arena_on_loop(frame);
    if (is_for_arena(frame.header)) offer_arena_on_loop();
    if (frame.header.in_bulk) return wait_for_bulk_on_loop(std::move(frame));
    if (!must_wait(frame.header)) return pass_on_loop(std::move(frame));
    waiting_bytes_ += cost_of(frame);
    waiting_.push_back(std::move(frame));
  }

  // Returns the memory that a waiting frame takes, without a payload that has come in bulk.
  static size_t cost_of(const InFrame& frame) {
    const uint64_t payload = frame.header.payload_bytes;
    return kCostOfWaiting + frame.meta.size() + (payload < wire::kLeastInBulk ? payload : 0);
  }

  void pass_on_loop(InFrame frame) {
    const std::shared_ptr<Handler> handler = handler_;  // it may replace itself
    if (handler->on_frame) handler->on_frame(std::move(frame));
  }

  // ---- payloads in bulk: Note [Bulk connections] ----

  void wait_for_bulk_on_loop(InFrame frame) {
    if (!bulk_receiver_ || frame.header.kind == wire::FrameKind::kChunk) {
      throw base::Exception(base::ErrorKind::kProtocol, "a bulk connection that is not agreed");
    }
    const uint64_t bytes = frame.header.payload_bytes;
    waiting_bytes_ += cost_of(frame);
    waiting_.push_back(std::move(frame));
    bulk_receiver_->expect(bytes, [weak = weak_from_this(), loop = loop_](base::BufferPtr payload) {
      loop->post([weak, payload = std::move(payload)] {
        const auto self = weak.lock();
        if (self) self->guard_on_loop([&] { self->take_bulk_on_loop(payload); });
      });
    });
  }

  bool must_wait(const wire::FrameHeader& header) const {
    using enum wire::FrameKind;
    switch (header.kind) {
      case kOneway:
        return std::any_of(waiting_.rbegin(), waiting_.rend(), [&](const InFrame& frame) {
          return frame.header.kind == kOneway && frame.header.channel == header.channel;
        });
      case kCancel:
      case kRRefDelete:
      case kLeave:
        return !waiting_.empty();
      default:
        return false;
    }
  }

  // Gives the first waiting frame its payload, and delivers all frames that waited for it only.
  void take_bulk_on_loop(const base::BufferPtr& payload) {
    if (waiting_.empty()) return;  // the stream has ended
    InFrame& first = waiting_.front();
    first.header.in_bulk = false;
    first.payload = {payload->data, first.header.payload_bytes};
    first.body = owner_of(std::move(first.body), payload);
    loop_->note_activity_on_loop();
    while (!waiting_.empty() && !waiting_.front().header.in_bulk) {
      InFrame frame = std::move(waiting_.front());
      waiting_.pop_front();
      waiting_bytes_ -= cost_of(frame);
      pass_on_loop(std::move(frame));
    }
    if (ended_ && waiting_.empty()) return finish_on_loop(*ended_);
    watch_on_loop(watches_writable_);
  }

  void lost_bulk_on_loop(const base::Error& error) {
    if (finished_ || discarding_) return;
    const base::Error named{error.kind, peer_text() + ": " + error.message};
    const bool is_peers = error.kind == base::ErrorKind::kPeerLost && !ended_;
    is_peers ? write_failed_on_loop(named) : finish_on_loop(named);
  }

  void drop_unfinished_on_loop() {
    reader_.stop();
    waiting_.clear();
    waiting_bytes_ = 0;
  }

  // ---- shared memory: Note [Payloads in shared memory] ----

  // Creates the memory in which this side receives large payloads, once, and tells the peer.
  void offer_arena_on_loop() {
    const uint64_t bytes = std::exchange(arena_bytes_, 0);
    if (bytes == 0 || discarding_) return;
    auto descriptor = std::make_shared<Fd>();
    auto memory = SharedMemory::create(kArenaHead + bytes, *descriptor);
    if (!memory.ok()) return;  // then the socket carries all payloads
    reader_.arena = std::make_shared<ReceiveArena>(std::move(memory.unchecked()));
    OutFrame frame;
    frame.header = {.kind = wire::FrameKind::kArena, .call_id = kArenaHead + bytes};
    frame.descriptor = std::move(descriptor);
    static_cast<void>(send(std::move(frame)));  // on_close reports errors
  }

  void take_arena_on_loop(const InFrame& frame) {
    const uint64_t bytes = frame.header.call_id;
    if (!frame.descriptor || bytes <= kArenaHead || bytes > reader_.limits.max_payload_bytes) {
      fail_attached();
    }
    auto memory = SharedMemory::open(*frame.descriptor, bytes);
    if (!memory.ok()) {
      if (memory.error().kind == base::ErrorKind::kProtocol) fail_attached();
      return;  // this process cannot map it
    }
    auto arena = std::make_shared<SendArena>(std::move(memory.unchecked()));
    std::lock_guard lock(mutex_);
    if (!send_arena_) send_arena_ = std::move(arena);
  }

  // ---- the end ----

  void finish_on_loop(base::Error error) {
    if (std::exchange(finished_, true)) return;
    drop_unfinished_on_loop();  // the stream may live long after its end
    if (linger_timer_ != 0) loop_->cancel(linger_timer_);
    writer_.stop_on_loop();
    if (opened_) uv_poll_stop(&poll_);  // before the descriptor is closed
    socket_.reset();
    if (bulk_receiver_) std::exchange(bulk_receiver_, nullptr)->close();
    std::unique_lock lock(mutex_);
    const std::shared_ptr<BulkSender> bulk = std::move(bulk_sender_);
    lock.unlock();
    if (bulk) bulk->close();
    if (opened_) {
      uv_close(reinterpret_cast<uv_handle_t*>(&poll_), [](uv_handle_t* handle) noexcept {
        auto* self = static_cast<SocketStream*>(handle->data);
        self->loop_->release_on_loop(self);
      });
    } else {
      loop_->release_on_loop(this);
    }
    const std::shared_ptr<Handler> handler = std::exchange(handler_, std::make_shared<Handler>());
    if (handler->on_close) handler->on_close(error);
  }

  const std::shared_ptr<Loop::Impl> loop_;
  std::string peer_name_ = "unix";
  bool is_tcp_ = false;

  FrameWriter writer_{
      [this] { loop_->post([self = shared_from_this()] { self->drain_on_loop(); }); }};
  std::atomic<bool> is_closing_ = false;  // close() was called
  std::mutex mutex_;
  std::shared_ptr<SendArena> send_arena_;    // by mutex_; the peer's memory
  std::shared_ptr<BulkSender> bulk_sender_;  // set by mutex_; only the loop reads without it
  base::Task open_bulk_;                     // by mutex_; opens the bulk connection, once

  // Loop thread only.
  Fd socket_;
  uv_poll_t poll_;
  bool opened_ = false;
  int watched_ = 0;  // events
  bool watches_writable_ = false;
  bool finished_ = false;
  std::optional<base::Error> ended_;  // the peer has closed, and payloads are still to come
  bool write_failed_ = false;
  bool discarding_ = false;  // closed here and flushed: drops what still comes
  uint64_t linger_timer_ = 0;
  std::shared_ptr<Handler> handler_ = std::make_shared<Handler>();
  FrameReader reader_{{.deliver = [this](InFrame frame) { deliver_on_loop(std::move(frame)); },
                       .allocate =
                           [this](const wire::FrameHeader& header) {
                             return handler_->allocate ? handler_->allocate(header) : nullptr;
                           }}};
  std::shared_ptr<BulkReceiver> bulk_receiver_;
  std::deque<InFrame> waiting_;  // the first lacks its payload, the others must not overtake it
  size_t waiting_bytes_ = 0;     // of waiting_, without payloads in bulk
  std::atomic<bool> takes_descriptors_ = false;  // any thread reads it
  uint64_t arena_bytes_ = 0;                     // size of the receive arena, until it is created
};

}  // namespace

StreamPtr adopt_socket(Loop& loop, int fd) {
  return std::make_shared<SocketStream>(loop.impl(), fd);
}

}  // namespace distrain::net

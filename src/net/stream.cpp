#include "distrain/net/stream.h"

#include <condition_variable>
#include <deque>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <uv.h>

#include "net_impl.h"

namespace distrain::net {
namespace {

// The longest wait for the peer's end of the connection: see linger_on_loop().
constexpr auto kLongestLinger = std::chrono::seconds(1);
// Bytes that a caller writes between two checks of whether the stream is closed.
constexpr size_t kSlice = size_t{1} << 20;
// By default a Unix socket takes about 200 KB, and for each further part the loop of the writer is
// woken. The kernel reduces the value to net.core.wmem_max.
constexpr int kUnixSendBuffer = 1 << 20;

// BBR paces what it sends: within one host large messages take twice as long for no benefit.
void avoid_bbr(int fd) {
  char name[16] = {};
  socklen_t size = sizeof name;
  getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size);
  if (!std::string_view(name, size).starts_with("bbr")) return;
  for (const std::string_view other : {"cubic", "reno"}) {
    if (setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, other.data(), other.size()) == 0) return;
  }
}

base::Error closed_here() {
  return base::Error{base::ErrorKind::kCancelled, "closed on this side"};
}

class UvStream final : public Stream,
                       public LoopResource,
                       public std::enable_shared_from_this<UvStream> {
 public:
  UvStream(std::shared_ptr<Loop::Impl> loop, int fd) : loop_(std::move(loop)), fd_(fd) {
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
  ~UvStream() override {
    if (fd_ >= 0) ::close(fd_);  // never started
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
    limits_ = limits;
  }

  void set_handler_on_loop(Handler handler) override {
    loop_->assert_in_loop();
    handler_ = std::make_shared<Handler>(std::move(handler));
  }

  base::Status send(OutFrame frame) override {
    if (const base::Status fits = check_limits(frame); !fits.ok()) return fits;
    auto pending = std::make_unique<PendingFrame>(std::move(frame));
    {
      std::lock_guard lock(send_mutex_);
      if (send_state_ == SendState::kClosing || send_state_ == SendState::kClosed) {
        return base::Error{base::ErrorKind::kPeerLost, "the connection is closed"};
      }
      if (send_state_ == SendState::kDraining || caller_writes_) {
        queue_.push_back(std::move(pending));
        return base::Unit{};
      }
      caller_writes_ = true;
    }
    write_and_leave(std::move(pending));
    return base::Unit{};
  }

  void close(bool flush) override {
    {
      std::lock_guard lock(send_mutex_);
      if (send_state_ == SendState::kClosed) return;
      send_state_ = SendState::kClosing;
    }
    loop_->post([self = shared_from_this(), flush] {
      flush ? self->drain_on_loop() : self->shut_down_on_loop();
    });
  }

  base::TimePoint last_heard_on_loop() const override { return last_heard_; }
  const std::string& peer_name() const override { return peer_name_; }
  std::optional<uint32_t> peer_user_on_loop() override {
    loop_->assert_in_loop();
    std::lock_guard lock(send_mutex_);
    return fd_ < 0 ? std::nullopt : peer_user(fd_);
  }
  void shut_down_on_loop() override {
    finish_on_loop(base::Error{base::ErrorKind::kCancelled, "this side is closing"});
  }

 private:
  enum class SendState { kIdle, kDraining, kClosing, kClosed };

  base::Error peer_closed(int uv_code) const {
    const std::string who = is_tcp_ ? peer_name_ : "the other process";
    return {base::ErrorKind::kPeerLost,
            uv_code == UV_EOF ? who + " closed the connection" : who + ": " + uv_strerror(uv_code)};
  }
  uv_stream_t* uv_stream() { return reinterpret_cast<uv_stream_t*>(&handle_); }

  // ---- sending ----

  // Writes without the lock, because a large frame takes long and other threads queue theirs
  // meanwhile. Also writes a few small frames of others; the loop is woken for all else.
  void write_and_leave(std::unique_ptr<PendingFrame> frame) {
    std::unique_ptr<PendingFrame> done;  // destroyed outside the lock
    size_t of_others = 0;
    for (;;) {
      done = nullptr;
      const bool is_full = !frame->write_to(fd_, kSlice);
      std::lock_guard lock(send_mutex_);
      if (send_state_ == SendState::kClosed) {
        caller_writes_ = false;
        caller_left_.notify_all();
        done = std::move(frame);
        return;
      }
      // The loop must not stay with one stream.
      if (!is_full && !frame->done() && !loop_->in_loop()) continue;
      if (frame->done()) {
        done = std::move(frame);
        if (!queue_.empty() && of_others + queue_.front()->bytes_left() <= kSlice) {
          frame = std::move(queue_.front());
          queue_.pop_front();
          of_others += frame->bytes_left();
          continue;
        }
      } else {
        queue_.push_front(std::move(frame));
      }
      caller_writes_ = false;
      if (queue_.empty() && send_state_ == SendState::kIdle) return;
      if (send_state_ == SendState::kIdle) send_state_ = SendState::kDraining;
      break;
    }
    loop_->post([self = shared_from_this()] { self->drain_on_loop(); });
  }

  void drain_on_loop() {
    if (writing_ || write_failed_ || finished_ || !opened_) return;
    std::vector<uv_buf_t> pieces;
    {
      std::lock_guard lock(send_mutex_);
      if (caller_writes_) return;  // it calls again
      if (queue_.empty()) {
        if (send_state_ == SendState::kDraining) send_state_ = SendState::kIdle;
      } else {
        // The front frame stays where it is until its write is done.
        pieces = queue_.front()->next_pieces();
      }
      if (pieces.empty() && send_state_ != SendState::kClosing) return;
    }
    if (pieces.empty()) return linger_on_loop();
    write_size_ = 0;
    for (const uv_buf_t& piece : pieces) write_size_ += piece.len;
    writing_ = true;
    const int code =
        uv_write(&write_request_, uv_stream(), pieces.data(), static_cast<unsigned>(pieces.size()),
                 [](uv_write_t* request, int status) noexcept {
                   static_cast<UvStream*>(request->handle->data)->wrote_on_loop(status);
                 });
    if (code < 0) {
      writing_ = false;
      write_failed_on_loop(code);
    }
  }

  void wrote_on_loop(int status) {
    writing_ = false;
    if (finished_) return drop_queue();
    if (status < 0) return write_failed_on_loop(status);
    std::unique_ptr<PendingFrame> done;  // destroyed outside the lock
    {
      std::lock_guard lock(send_mutex_);
      PendingFrame& front = *queue_.front();
      front.wrote(write_size_);
      if (front.done()) {
        done = std::move(queue_.front());
        queue_.pop_front();
      }
    }
    drain_on_loop();
  }

  // The peer reads no more. Its last bytes may say why, so the stream ends when they are read.
  void write_failed_on_loop(int code) {
    write_failed_ = true;
    {
      std::lock_guard lock(send_mutex_);
      if (send_state_ == SendState::kDraining) send_state_ = SendState::kClosing;
    }
    drop_queue();
    linger_timer_ =
        loop_->call_at(base::Clock::now() + kLongestLinger, [self = shared_from_this(), code] {
          // A late loop runs timers before it polls sockets; between two tasks it polls.
          self->loop_->post([self, code] {
            self->loop_->post([self, code] { self->finish_on_loop(self->peer_closed(code)); });
          });
        });
  }

  // Closing a TCP socket with unread bytes would reset the connection, and the kernel would drop
  // what it has not sent. So shut down only our direction, and discard what comes until the peer
  // closes its own or kLongestLinger has passed.
  void linger_on_loop() {
    if (discarding_) return;
    discarding_ = true;
    body_ = nullptr;
    head_filled_ = 0;
    ::shutdown(fd_, SHUT_WR);
    linger_timer_ =
        loop_->call_at(base::Clock::now() + kLongestLinger,
                       [self = shared_from_this()] { self->finish_on_loop(closed_here()); });
  }

  void drop_queue() {
    std::deque<std::unique_ptr<PendingFrame>> dropped;  // destroyed outside the lock
    std::lock_guard lock(send_mutex_);
    dropped.swap(queue_);
  }

  // ---- receiving ----

  void open_on_loop() {
    if (finished_) {  // closed before it was started
      const std::shared_ptr<Handler> handler = std::exchange(handler_, std::make_shared<Handler>());
      if (handler->on_close) handler->on_close(closed_here());
      return;
    }
    last_heard_ = loop_->now_on_loop();
    loop_->scratch_on_loop();  // allocates here, because a callback of libuv must not throw
    int code = 0;
    if (is_tcp_) {
      uv_tcp_init(&loop_->uv, &handle_.tcp);
      code = uv_tcp_open(&handle_.tcp, fd_);
    } else {
      uv_pipe_init(&loop_->uv, &handle_.pipe, 0);
      code = uv_pipe_open(&handle_.pipe, fd_);
    }
    uv_stream()->data = this;
    opened_ = true;
    owns_fd_ = code < 0;
    if (code == 0) {
      code = uv_read_start(
          uv_stream(),
          [](uv_handle_t* handle, size_t, uv_buf_t* buffer) noexcept {
            static_cast<UvStream*>(handle->data)->alloc_on_loop(buffer);
          },
          [](uv_stream_t* stream, ssize_t bytes, const uv_buf_t* buffer) noexcept {
            static_cast<UvStream*>(stream->data)->read_on_loop(bytes, buffer);
          });
    }
    loop_->hold_on_loop(shared_from_this());
    if (code < 0) {
      finish_on_loop(peer_closed(code));
    } else {
      drain_on_loop();  // what was sent before
    }
  }

  void alloc_on_loop(uv_buf_t* buffer) {
    std::span<uint8_t> room;
    if (body_) {
      room = {body_->data + body_filled_, std::min(body_->size - body_filled_, size_t{1} << 30)};
    } else {
      std::copy_n(head_.begin(), head_filled_, loop_->scratch_on_loop().begin());
      room = loop_->scratch_on_loop().subspan(head_filled_);
    }
    *buffer = uv_buf_init(reinterpret_cast<char*>(room.data()), static_cast<unsigned>(room.size()));
  }

  void read_on_loop(ssize_t bytes, const uv_buf_t*) {
    if (finished_ || bytes == 0) return;
    if (bytes < 0) {
      return finish_on_loop(discarding_ ? closed_here() : peer_closed(static_cast<int>(bytes)));
    }
    if (discarding_) return;
    last_heard_ = loop_->now_on_loop();
    const auto self = shared_from_this();  // a handler may let go of the stream
    if (body_) {
      loop_->note_activity_on_loop();
      body_filled_ += static_cast<size_t>(bytes);
      if (body_filled_ == body_->size) deliver_on_loop();
    } else {
      const size_t have = std::exchange(head_filled_, 0) + static_cast<size_t>(bytes);
      std::span<const uint8_t> unread = loop_->scratch_on_loop().first(have);
      while (!finished_ && consume_on_loop(unread)) {
      }
    }
  }

  // Takes the available bytes of a frame from `unread`. Returns false if more must be read first.
  bool consume_on_loop(std::span<const uint8_t>& unread) {
    if (unread.size() < wire::kHeaderBytes) {
      head_filled_ = unread.size();
      std::copy(unread.begin(), unread.end(), head_.begin());
      return false;
    }
    if (!begin_frame_on_loop(unread.data())) return false;
    const size_t taken = std::min(unread.size() - wire::kHeaderBytes, body_->size);
    if (taken > 0) std::memcpy(body_->data, unread.data() + wire::kHeaderBytes, taken);
    body_filled_ = taken;
    unread = unread.subspan(wire::kHeaderBytes + taken);
    if (body_filled_ < body_->size) return false;
    deliver_on_loop();
    return !unread.empty();
  }

  bool begin_frame_on_loop(const uint8_t* head) {
    try {
      header_ = wire::decode_header(
                    std::span<const uint8_t, wire::kHeaderBytes>(head, wire::kHeaderBytes), limits_)
                    .value();
      if (handler_->allocate) body_ = handler_->allocate(header_);
    } catch (...) {
      finish_on_loop(base::current_error(base::ErrorKind::kInternal));
      return false;
    }
    const uint64_t bytes = header_.body_bytes();
    if (!body_) body_ = loop_->buffers.allocate(bytes);
    if (body_) return true;
    finish_on_loop(base::Error{base::ErrorKind::kResources,
                               "no memory for a message of " + std::to_string(bytes) + " bytes"});
    return false;
  }

  void deliver_on_loop() {
    // After activity the loop polls. It does not poll after a heartbeat, because nothing follows at
    // once, and rank 0 would always keep a core busy.
    if (header_.kind != wire::FrameKind::kHeartbeat) loop_->note_activity_on_loop();
    InFrame frame{header_, {}, {}, std::exchange(body_, nullptr)};
    frame.meta = {frame.body->data, header_.meta_bytes};
    frame.payload = {frame.body->data + header_.payload_offset(), header_.payload_bytes};
    const std::shared_ptr<Handler> handler = handler_;  // it may replace itself
    if (handler->on_frame) handler->on_frame(std::move(frame));
  }

  // ---- the end ----

  void finish_on_loop(base::Error error) {
    if (finished_) return;
    finished_ = true;
    body_ = nullptr;  // the stream may live long after its end
    if (linger_timer_ != 0) loop_->cancel(linger_timer_);
    std::deque<std::unique_ptr<PendingFrame>> dropped;
    {
      std::unique_lock lock(send_mutex_);
      send_state_ = SendState::kClosed;
      // Waits for the rest of a slice at most.
      caller_left_.wait(lock, [this] { return !caller_writes_; });
      if (owns_fd_) ::close(fd_);
      fd_ = -1;
      // libuv may use the front frame until wrote_on_loop().
      if (!writing_) dropped.swap(queue_);
    }
    if (opened_) {
      uv_close(reinterpret_cast<uv_handle_t*>(uv_stream()), [](uv_handle_t* handle) noexcept {
        auto* self = static_cast<UvStream*>(handle->data);
        self->loop_->release_on_loop(self);
      });
    } else {
      loop_->release_on_loop(this);
    }
    const std::shared_ptr<Handler> handler = std::move(handler_);
    handler_ = std::make_shared<Handler>();
    if (handler->on_close) handler->on_close(error);
  }

  const std::shared_ptr<Loop::Impl> loop_;
  std::string peer_name_ = "unix";
  bool is_tcp_ = false;

  std::mutex send_mutex_;
  SendState send_state_ = SendState::kIdle;          // by send_mutex_
  std::deque<std::unique_ptr<PendingFrame>> queue_;  // by send_mutex_; front: being written
  bool caller_writes_ = false;  // by send_mutex_; while it does, nobody else writes or closes
  std::condition_variable caller_left_;
  int fd_ = -1;  // changes by send_mutex_, and while no caller writes; libuv closes it

  // Loop thread only.
  union {
    uv_tcp_t tcp;
    uv_pipe_t pipe;
  } handle_;
  bool opened_ = false;
  bool owns_fd_ = true;  // libuv does not
  bool finished_ = false;
  base::TimePoint last_heard_;
  bool write_failed_ = false;
  bool discarding_ = false;  // closed here and flushed: drops what still comes
  uint64_t linger_timer_ = 0;
  uv_write_t write_request_;
  bool writing_ = false;
  size_t write_size_ = 0;
  std::shared_ptr<Handler> handler_ = std::make_shared<Handler>();
  wire::Limits limits_;
  std::array<uint8_t, wire::kHeaderBytes> head_;  // the beginning of an incomplete header
  size_t head_filled_ = 0;
  wire::FrameHeader header_;  // of the frame being read, when body_ is set
  base::BufferPtr body_;
  size_t body_filled_ = 0;
};

}  // namespace

StreamPtr adopt_socket(Loop& loop, int fd) { return std::make_shared<UvStream>(loop.impl(), fd); }

}  // namespace distrain::net

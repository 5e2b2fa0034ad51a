#include "distrain/net/stream.h"

#include <condition_variable>
#include <cstring>
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
// Bytes that a caller writes between two checks of whether the stream is closed, and that the loop
// writes or reads before it serves other streams.
constexpr size_t kSlice = size_t{1} << 20;
// The loop thread copies no larger payload into shared memory.
constexpr size_t kMostCopiedOnLoop = size_t{256} << 10;
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

// Chunks are received into memory from which a device can copy, so they need the socket.
bool is_for_arena(const wire::FrameHeader& header) {
  return header.payload_bytes >= kLeastInArena && header.kind != wire::FrameKind::kChunk;
}

class SocketStream final : public Stream,
                           public LoopResource,
                           public std::enable_shared_from_this<SocketStream> {
 public:
  SocketStream(std::shared_ptr<Loop::Impl> loop, int fd) : loop_(std::move(loop)), fd_(fd) {
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
  ~SocketStream() override {
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
    if (!takes_descriptors_) frame.descriptor = nullptr;
    auto pending = make_pending(std::move(frame));
    PendingFrame* const own = pending.get();
    {
      std::lock_guard lock(send_mutex_);
      if (send_state_ == SendState::kClosing || send_state_ == SendState::kClosed) {
        return base::Error{base::ErrorKind::kPeerLost, "the connection is closed"};
      }
      queue_.push(std::move(pending));
      if (send_state_ == SendState::kDraining || caller_writes_) return base::Unit{};
      caller_writes_ = true;
      queue_.next();  // the queue was empty
    }
    write_and_leave(own);
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
  void share_memory_on_loop(uint64_t bytes) override {
    loop_->assert_in_loop();
    takes_descriptors_ = !is_tcp_;
    if (!is_tcp_) arena_bytes_ = bytes;
  }
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

  base::Error peer_closed(int code) const {
    const std::string who = is_tcp_ ? peer_name_ : "the other process";
    return {base::ErrorKind::kPeerLost,
            code == 0 ? who + " closed the connection" : who + ": " + uv_strerror(-code)};
  }

  // ---- sending ----

  std::unique_ptr<PendingFrame> make_pending(OutFrame frame) {
    frame.header.payload_bytes = frame.payload_bytes();
    if (!is_for_arena(frame.header) ||
        (frame.header.payload_bytes > kMostCopiedOnLoop && loop_->in_loop())) {
      return std::make_unique<PendingFrame>(std::move(frame));
    }
    std::shared_ptr<SendArena> arena;
    {
      std::lock_guard lock(send_mutex_);
      arena = send_arena_;
    }
    return std::make_unique<PendingFrame>(std::move(frame), arena.get());
  }

  // Writes `own`, the first frame of the queue, without the lock, because a large frame takes long
  // and other threads queue theirs meanwhile. Also writes frames that overtake it, and a few small
  // ones after it; the loop is woken for all else.
  void write_and_leave(PendingFrame* own) {
    std::unique_ptr<PendingFrame> done;  // destroyed outside the lock
    size_t of_others = 0;
    for (PendingFrame* frame = own;;) {
      done = nullptr;
      const bool is_full = frame->write_to(fd_, kSlice) != 0;  // the loop reports an error
      std::lock_guard lock(send_mutex_);
      if (send_state_ == SendState::kClosed) {
        caller_writes_ = false;
        caller_left_.notify_all();
        return;
      }
      if (frame->done()) {
        done = queue_.pop();
        if (frame == own) own = nullptr;
      }
      PendingFrame* const next = queue_.next();
      if (next && !is_full) {
        // The loop must not stay with one stream.
        if (!own) of_others += next->bytes_left();
        if (own ? !loop_->in_loop() : of_others <= kSlice) {
          frame = next;
          continue;
        }
      }
      caller_writes_ = false;
      if (!next && send_state_ == SendState::kIdle) return;
      if (send_state_ == SendState::kIdle) send_state_ = SendState::kDraining;
      break;
    }
    loop_->post([self = shared_from_this()] { self->drain_on_loop(); });
  }

  // Writes the queue as far as the socket takes it, and goes on when it is writable again.
  void drain_on_loop() {
    if (write_failed_ || finished_ || !opened_) return;
    std::unique_ptr<PendingFrame> done;  // destroyed outside the lock
    for (size_t written = 0;;) {
      PendingFrame* front = nullptr;
      done = nullptr;
      {
        std::lock_guard lock(send_mutex_);
        if (caller_writes_) return watch_on_loop(false);  // it calls again
        front = queue_.next();                            // only the loop takes frames away now
        if (!front && send_state_ == SendState::kDraining) {
          send_state_ = SendState::kIdle;
        }
        if (!front && send_state_ != SendState::kClosing) break;
      }
      if (!front) {
        watch_on_loop(false);
        return linger_on_loop();
      }
      if (written >= kSlice) return watch_on_loop(true);  // to serve other streams
      const size_t before = front->bytes_left();
      const int code = front->write_to(fd_, kSlice);
      if (code != 0 && code != EAGAIN) return write_failed_on_loop(code);
      written += before - front->bytes_left();
      if (front->done()) {
        std::lock_guard lock(send_mutex_);
        done = queue_.pop();
      }
      if (code == EAGAIN) return watch_on_loop(true);
    }
    watch_on_loop(false);
  }

  // Lets the loop call back when the socket is readable, and when it is `writable`.
  void watch_on_loop(bool writable) {
    if (finished_ || (watched_ && writable == watches_writable_)) return;
    watched_ = true;
    watches_writable_ = writable;
    uv_poll_start(&poll_, UV_READABLE | (writable ? UV_WRITABLE : 0),
                  [](uv_poll_t* handle, int status, int events) noexcept {
                    static_cast<SocketStream*>(handle->data)->on_ready_on_loop(status, events);
                  });
  }

  void on_ready_on_loop(int status, int events) {
    const auto self = shared_from_this();  // a handler may let go of the stream
    const bool has_error = status < 0;     // then libuv has stopped the handle; reading says which
    if (has_error) watched_ = false;
    if (has_error || (events & UV_READABLE)) read_on_loop();
    if (has_error || (events & UV_WRITABLE)) drain_on_loop();
    if (has_error) watch_on_loop(watches_writable_);
  }

  // The peer reads no more. Its last bytes may say why, so the stream ends when they are read.
  void write_failed_on_loop(int code) {
    write_failed_ = true;
    watch_on_loop(false);
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
    drop_unfinished_on_loop();
    ::shutdown(fd_, SHUT_WR);
    linger_timer_ =
        loop_->call_at(base::Clock::now() + kLongestLinger,
                       [self = shared_from_this()] { self->finish_on_loop(closed_here()); });
  }

  // Returns true if this side has closed the stream, and its last frame is written.
  bool has_sent_all() {
    std::lock_guard lock(send_mutex_);
    return send_state_ == SendState::kClosing && queue_.empty() && !caller_writes_ &&
           !write_failed_;
  }

  void drop_queue() {
    SendQueue::Lanes dropped;  // destroyed outside the lock
    std::lock_guard lock(send_mutex_);
    dropped = queue_.take_all();
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
    loop_->hold_on_loop(shared_from_this());
    if (const int code = uv_poll_init(&loop_->uv, &poll_, fd_); code < 0) {
      return finish_on_loop(peer_closed(-code));
    }
    poll_.data = this;
    opened_ = true;
    watch_on_loop(false);
    drain_on_loop();  // what was sent before
  }

  // Reads until the socket is empty, or kSlice bytes have come.
  void read_on_loop() {
    for (size_t taken = 0; taken < kSlice && !finished_;) {
      const std::span<uint8_t> scratch = loop_->scratch_on_loop();
      std::copy_n(head_.begin(), head_filled_, scratch.begin());
      // Segments are read to where they belong, and with each one the next header behind it.
      std::span<uint8_t> behind = scratch.subspan(head_filled_);
      if (segmented_.body) behind = behind.first(wire::kHeaderBytes - head_filled_);
      if (!room_.empty() && !segmented_.body) behind = {};
      const ssize_t bytes = receive_on_loop(room_, behind);
      if (bytes < 0 && errno == EINTR) continue;
      if (bytes < 0 && errno == EAGAIN) return;
      if (bytes <= 0) {
        const int code = bytes < 0 ? errno : 0;
        return finish_on_loop(has_sent_all() ? closed_here() : peer_closed(code));
      }
      const bool is_empty = static_cast<size_t>(bytes) < room_.size() + behind.size();
      taken += static_cast<size_t>(bytes);
      if (discarding_) {
        descriptors_.clear();
        continue;
      }
      take_bytes_on_loop(static_cast<size_t>(bytes));
      // The peer's proof and the first frame with a descriptor may come in one read.
      if (!takes_descriptors_) descriptors_.clear();
      if (descriptors_.size() > 1) {
        return finish_on_loop({base::ErrorKind::kProtocol, "descriptors that no frame announces"});
      }
      if (is_empty) return;
    }
  }

  ssize_t receive_on_loop(std::span<uint8_t> first, std::span<uint8_t> second) {
    iovec pieces[] = {{first.data(), first.size()}, {second.data(), second.size()}};
    alignas(cmsghdr) uint8_t control[CMSG_SPACE(4 * sizeof(int))];
    msghdr message{};
    message.msg_iov = first.empty() ? pieces + 1 : pieces;
    message.msg_iovlen = first.empty() || second.empty() ? 1 : 2;
    if (!is_tcp_) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
    }
    const ssize_t bytes = ::recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes <= 0) return bytes;
    for (cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
      if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = 0; at + sizeof(int) <= head->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
        int value = -1;
        std::memcpy(&value, CMSG_DATA(head) + at, sizeof value);
        descriptors_.push_back(std::make_shared<const Fd>(value));
      }
    }
    return bytes;
  }

  // Takes `bytes` that were read into `room_`, and then behind head_ in the scratch buffer.
  void take_bytes_on_loop(size_t bytes) {
    last_heard_ = loop_->now_on_loop();
    if (!room_.empty()) {
      loop_->note_activity_on_loop();
      const size_t taken = std::min(bytes, room_.size());
      room_ = room_.subspan(taken);
      bytes -= taken;
      if (!room_.empty()) return;
      end_part_on_loop();
      if (bytes == 0) return;
    }
    const size_t have = std::exchange(head_filled_, 0) + bytes;
    std::span<const uint8_t> unread = loop_->scratch_on_loop().first(have);
    while (!finished_ && consume_on_loop(unread)) {
    }
  }

  // Takes the available bytes of a part from `unread`. Returns false if more must be read first.
  bool consume_on_loop(std::span<const uint8_t>& unread) {
    if (unread.size() < wire::kHeaderBytes) {
      head_filled_ = unread.size();
      std::copy(unread.begin(), unread.end(), head_.begin());
      return false;
    }
    if (!begin_part_on_loop(unread.data())) return false;
    const size_t taken = std::min(unread.size() - wire::kHeaderBytes, room_.size());
    if (taken > 0) std::memcpy(room_.data(), unread.data() + wire::kHeaderBytes, taken);
    room_ = room_.subspan(taken);
    unread = unread.subspan(wire::kHeaderBytes + taken);
    if (!room_.empty()) return false;
    end_part_on_loop();
    return !unread.empty();
  }

  bool begin_part_on_loop(const uint8_t* head) {
    try {
      header_ = wire::decode_header(
                    std::span<const uint8_t, wire::kHeaderBytes>(head, wire::kHeaderBytes), limits_)
                    .value();
      if (header_.kind == wire::FrameKind::kSegment) {
        begin_segment();
      } else {
        begin_frame_on_loop();
      }
      return true;
    } catch (...) {
      finish_on_loop(base::current_error(base::ErrorKind::kInternal));
      return false;
    }
  }

  void begin_frame_on_loop() {
    using enum wire::FrameKind;
    uint64_t bytes = header_.body_bytes();
    uint64_t room = header_.part_bytes();
    if (header_.in_segments && (segmented_.body || slot_)) fail_segment();
    if (header_.kind == kAttached || header_.kind == kArena) {
      if (!takes_descriptors_ || bytes > 0) fail_attached();
    } else if (handler_->allocate) {
      body_ = handler_->allocate(header_);
    }
    if (slot_) {
      if (!receive_arena_ || header_.kind == kChunk) fail_attached();
      in_arena_ = receive_arena_->take(*slot_, header_.payload_bytes).value();
      slot_.reset();
      body_ = nullptr;
      bytes = room = header_.meta_bytes;
    }
    if (!body_) body_ = loop_->buffers.allocate(bytes);
    if (!body_) {
      throw base::Exception(base::ErrorKind::kResources,
                            "no memory for a message of " + std::to_string(bytes) + " bytes");
    }
    room_ = {body_->data, room};
  }

  // ---- frames in segments: Note [Segments] ----

  [[noreturn]] static void fail_segment() {
    throw base::Exception(base::ErrorKind::kProtocol, "a segment that does not continue a message");
  }

  void begin_segment() {
    const wire::FrameHeader& whole = segmented_.header;
    const uint64_t left = whole.body_bytes() - segmented_.filled;
    if (!segmented_.body || slot_ || attached_ ||
        header_ != wire::FrameHeader{.kind = wire::FrameKind::kSegment,
                                     .payload_bytes = std::min(left, wire::kSegmentBytes),
                                     .call_id = whole.payload_bytes - left}) {
      fail_segment();
    }
    room_ = {segmented_.body->data + segmented_.filled, header_.payload_bytes};
  }

  void end_part_on_loop() {
    if (header_.in_segments) {
      segmented_ = {header_, std::exchange(body_, nullptr), header_.part_bytes(),
                    std::exchange(attached_, nullptr)};
      segmented_.header.in_segments = false;
      return;
    }
    if (header_.kind == wire::FrameKind::kSegment) {
      segmented_.filled += header_.payload_bytes;
      if (segmented_.filled < segmented_.header.body_bytes()) return;
      header_ = segmented_.header;
      body_ = std::exchange(segmented_.body, nullptr);
      attached_ = std::exchange(segmented_.attached, nullptr);
    }
    deliver_on_loop();
  }

  void drop_unfinished_on_loop() {
    body_ = in_arena_ = nullptr;
    segmented_ = {};
    attached_ = nullptr;
    descriptors_.clear();
    room_ = {};
    head_filled_ = 0;
  }

  void deliver_on_loop() {
    // After activity the loop polls. It does not poll after a heartbeat, because nothing follows at
    // once, and rank 0 would always keep a core busy.
    if (header_.kind != wire::FrameKind::kHeartbeat) loop_->note_activity_on_loop();
    InFrame frame{
        header_, {}, {}, std::exchange(body_, nullptr), std::exchange(attached_, nullptr)};
    frame.meta = {frame.body->data, header_.meta_bytes};
    if (in_arena_) {
      frame.payload = {in_arena_->data, header_.payload_bytes};
      frame.is_shared = true;
      // One pointer that owns both buffers.
      const auto both = std::make_shared<std::pair<base::BufferPtr, base::BufferPtr>>(
          std::move(frame.body), std::exchange(in_arena_, nullptr));
      frame.body = base::BufferPtr(both, both->first.get());
    } else {
      frame.payload = {frame.body->data + header_.payload_offset(), header_.payload_bytes};
    }
    try {
      if (header_.kind == wire::FrameKind::kAttached) return take_attached_on_loop();
      if (header_.kind == wire::FrameKind::kArena) return take_arena_on_loop(frame);
    } catch (const base::Exception& e) {
      return finish_on_loop(e.error());
    }
    if (is_for_arena(header_)) offer_arena_on_loop();
    const std::shared_ptr<Handler> handler = handler_;  // it may replace itself
    if (handler->on_frame) handler->on_frame(std::move(frame));
  }

  // ---- shared memory: Note [Payloads in shared memory] ----

  [[noreturn]] static void fail_attached() {
    throw base::Exception(base::ErrorKind::kProtocol, "shared memory that is not as agreed");
  }

  // Creates the memory in which this side receives large payloads, once, and tells the peer.
  void offer_arena_on_loop() {
    const uint64_t bytes = std::exchange(arena_bytes_, 0);
    if (bytes == 0 || discarding_) return;
    auto descriptor = std::make_shared<Fd>();
    auto memory = SharedMemory::create(kArenaHead + bytes, *descriptor);
    if (!memory.ok()) return;  // then the socket carries all payloads
    receive_arena_ = std::make_shared<ReceiveArena>(std::move(memory.unchecked()));
    OutFrame frame;
    frame.header = {.kind = wire::FrameKind::kArena, .call_id = kArenaHead + bytes};
    frame.descriptor = std::move(descriptor);
    static_cast<void>(send(std::move(frame)));  // on_close reports errors
  }

  void take_attached_on_loop() {
    if (slot_ || attached_ || header_.autograd_id == 0 || header_.autograd_id > 3) fail_attached();
    if (header_.autograd_id & wire::kInSlot) {
      if (header_.call_id >= kArenaSlots) fail_attached();
      slot_ = {static_cast<uint32_t>(header_.call_id), header_.context_id};
    }
    if (header_.autograd_id & wire::kWithDescriptor) {
      if (descriptors_.size() != 1) fail_attached();
      attached_ = std::move(descriptors_.front());
      descriptors_.clear();
    }
  }

  void take_arena_on_loop(const InFrame& frame) {
    const uint64_t bytes = frame.header.call_id;
    if (!frame.descriptor || bytes <= kArenaHead || bytes > limits_.max_payload_bytes) {
      fail_attached();
    }
    auto memory = SharedMemory::open(*frame.descriptor, bytes);
    if (!memory.ok()) {
      if (memory.error().kind == base::ErrorKind::kProtocol) fail_attached();
      return;  // this process cannot map it
    }
    auto arena = std::make_shared<SendArena>(std::move(memory.unchecked()));
    std::lock_guard lock(send_mutex_);
    if (!send_arena_) send_arena_ = std::move(arena);
  }

  // ---- the end ----

  void finish_on_loop(base::Error error) {
    if (finished_) return;
    finished_ = true;
    drop_unfinished_on_loop();  // the stream may live long after its end
    if (linger_timer_ != 0) loop_->cancel(linger_timer_);
    SendQueue::Lanes dropped;
    {
      std::unique_lock lock(send_mutex_);
      send_state_ = SendState::kClosed;
      // Waits for the rest of a slice at most.
      caller_left_.wait(lock, [this] { return !caller_writes_; });
      dropped = queue_.take_all();
      if (opened_) uv_poll_stop(&poll_);  // before the descriptor is closed
      ::close(std::exchange(fd_, -1));
    }
    if (opened_) {
      uv_close(reinterpret_cast<uv_handle_t*>(&poll_), [](uv_handle_t* handle) noexcept {
        auto* self = static_cast<SocketStream*>(handle->data);
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
  SendState send_state_ = SendState::kIdle;  // by send_mutex_
  SendQueue queue_;                          // by send_mutex_
  bool caller_writes_ = false;  // by send_mutex_; while it does, nobody else writes or closes
  std::condition_variable caller_left_;
  int fd_ = -1;                            // changes by send_mutex_, and while no caller writes
  std::shared_ptr<SendArena> send_arena_;  // by send_mutex_; the peer's memory

  // Loop thread only.
  uv_poll_t poll_;
  bool opened_ = false;
  bool watched_ = false;
  bool watches_writable_ = false;
  bool finished_ = false;
  base::TimePoint last_heard_;
  bool write_failed_ = false;
  bool discarding_ = false;  // closed here and flushed: drops what still comes
  uint64_t linger_timer_ = 0;
  std::shared_ptr<Handler> handler_ = std::make_shared<Handler>();
  wire::Limits limits_;
  std::array<uint8_t, wire::kHeaderBytes> head_;  // the beginning of an incomplete header
  size_t head_filled_ = 0;
  wire::FrameHeader header_;  // of the frame being read, when body_ is set
  base::BufferPtr body_;
  std::span<uint8_t> room_;  // where the rest of the part belongs that is being read
  struct {
    wire::FrameHeader header;
    base::BufferPtr body;  // null: no frame is between two of its segments
    size_t filled = 0;
    std::shared_ptr<const Fd> attached;
  } segmented_;
  std::atomic<bool> takes_descriptors_ = false;  // any thread reads it
  uint64_t arena_bytes_ = 0;                     // size of receive_arena_, until it is created
  std::shared_ptr<ReceiveArena> receive_arena_;
  std::deque<std::shared_ptr<const Fd>> descriptors_;  // received, and not yet announced
  std::shared_ptr<const Fd> attached_;                 // of the next frame
  std::optional<ArenaSlot> slot_;                      // of the next frame
  base::BufferPtr in_arena_;                           // payload of the frame being read
};

}  // namespace

StreamPtr adopt_socket(Loop& loop, int fd) {
  return std::make_shared<SocketStream>(loop.impl(), fd);
}

}  // namespace distrain::net

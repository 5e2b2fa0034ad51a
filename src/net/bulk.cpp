#include "bulk.h"

#include <cerrno>

#include <sys/socket.h>

#include "distrain/base/thread_state.h"

namespace distrain::net {
namespace {

// Bytes that one system call copies. The kernel does not let another thread run meanwhile. On one
// host pieces of 16 KiB cost a quarter of the bandwidth, and pieces of 64 KiB delay small calls.
// Over TCP smaller pieces cost a third of the bandwidth, and offers of the core delay small calls.
constexpr size_t kUnixSlice = size_t{32} << 10;
constexpr size_t kTcpWriteSlice = size_t{1} << 20;
constexpr size_t kTcpReadSlice = size_t{256} << 10;
// Bytes that the loop reads for one connection before it serves others.
constexpr size_t kReadTurn = size_t{256} << 10;

base::Error broken(int code) {
  return {base::ErrorKind::kPeerLost,
          code == 0 ? "the bulk connection is closed" : std::string("bulk: ") + uv_strerror(-code)};
}

}  // namespace

// ---- BulkSocket ----

bool BulkSocket::open(Loop& loop, Fd socket) {
  if (loop_) return false;
  loop_ = loop.impl();
  is_tcp_ = socket_option(socket.get(), SOL_SOCKET, SO_DOMAIN) != AF_UNIX;
  socket_ = std::move(socket);
  loop_->post([self = shared_from_this()] {
    self->loop_->hold_on_loop(self);
    if (self->is_shut_down_) return;  // the loop is ending
    self->poll_.data = self.get();
    self->is_polled_ = uv_poll_init(&self->loop_->uv, &self->poll_, self->fd()) == 0;
    if (self->is_polled_) return self->begin_on_loop();
    self->break_on_loop({base::ErrorKind::kResources, "no memory to watch a bulk connection"});
  });
  return true;
}

void BulkSocket::watch_on_loop(int events) {
  if (!is_polled_ || events == std::exchange(watched_, events)) return;
  uv_poll_start(&poll_, events, [](uv_poll_t* handle, int status, int seen) noexcept {
    const auto self = static_cast<BulkSocket*>(handle->data)->shared_from_this();
    if (status < 0) self->watched_ = 0;  // libuv has stopped the handle
    self->on_ready_on_loop(seen);        // reading and writing report errors
  });
}

void BulkSocket::break_on_loop(const base::Error& error) {
  const OnBroken on_broken = std::exchange(on_broken_, {});
  shut_down_on_loop();
  if (on_broken) on_broken(error);
}

void BulkSocket::close() {
  if (!loop_) return drop_on_loop();
  loop_->post([self = shared_from_this()] { self->shut_down_on_loop(); });
}

void BulkSocket::shut_down_on_loop() {
  if (std::exchange(is_shut_down_, true)) return;
  drop_on_loop();
  if (is_polled_) uv_poll_stop(&poll_);  // before the descriptor is closed
  socket_.reset();
  on_broken_ = {};
  if (!std::exchange(is_polled_, false)) return loop_->release_on_loop(this);
  uv_close(reinterpret_cast<uv_handle_t*>(&poll_), [](uv_handle_t* handle) noexcept {
    auto* const self = static_cast<BulkSocket*>(handle->data);
    self->loop_->release_on_loop(self);
  });
}

// ---- BulkSender ----

void BulkSender::begin_on_loop() {
  writer_.set_socket(fd(), is_tcp_ ? kTcpWriteSlice : kUnixSlice, !is_tcp_);
  on_ready_on_loop(0);
}

// The receiver sends nothing, so only UV_DISCONNECT tells that the connection has ended while there
// is nothing to write.
void BulkSender::on_ready_on_loop(int events) {
  const int code = events & UV_DISCONNECT ? 0 : writer_.drain_on_loop();
  if (events & UV_DISCONNECT || (code != 0 && code != EAGAIN)) return break_on_loop(broken(code));
  watch_on_loop(UV_DISCONNECT | (code == EAGAIN ? UV_WRITABLE : 0));
}

// ---- BulkReceiver ----

void BulkReceiver::expect(uint64_t bytes, std::function<void(base::BufferPtr)> done) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back({bytes, std::move(done)});
    if (queue_.size() > 1 || !loop_) return;
  }
  loop_->post([self = shared_from_this()] {
    static_cast<BulkReceiver&>(*self).watch_on_loop(UV_READABLE);
  });
}

void BulkReceiver::on_ready_on_loop(int) {
  watch_on_loop(UV_READABLE);
  for (size_t taken = 0; taken < kReadTurn;) {
    Payload* first = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!queue_.empty()) first = &queue_.front();
    }
    if (!first) return watch_on_loop(0);  // expect() watches again
    if (!first->body) first->body = loop_->buffers.allocate(first->bytes);
    if (!first->body) {
      return break_on_loop(
          {base::ErrorKind::kResources,
           "no memory for a message of " + std::to_string(first->bytes) + " bytes"});
    }
    const size_t room =
        std::min<uint64_t>(first->bytes - first->filled, is_tcp_ ? kTcpReadSlice : kUnixSlice);
    const ssize_t bytes = ::recv(fd(), first->body->data + first->filled, room, MSG_DONTWAIT);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes <= 0) return break_on_loop(broken(bytes < 0 ? errno : 0));
    last_heard_ = base::Clock::now();
    if (!is_tcp_) base::thread_state().poll.offer_core();
    taken += static_cast<size_t>(bytes);
    first->filled += static_cast<size_t>(bytes);
    if (first->filled < first->bytes) continue;
    Payload whole = std::move(*first);
    {
      std::lock_guard lock(mutex_);
      queue_.pop_front();
    }
    whole.done(std::move(whole.body));
  }
}

void BulkReceiver::drop_on_loop() {
  decltype(queue_) dropped;  // destroyed without the lock
  std::lock_guard lock(mutex_);
  dropped.swap(queue_);
}

}  // namespace distrain::net

#include "bulk.h"

#include <cerrno>

#include <sys/socket.h>

namespace distrain::net {
namespace {

// Bytes that one system call copies. The kernel does not let another thread run meanwhile, and over
// TCP smaller pieces cost a third of the bandwidth.
constexpr size_t kUnixSlice = size_t{64} << 10;
constexpr size_t kTcpWriteSlice = size_t{1} << 20;
constexpr size_t kTcpReadSlice = size_t{256} << 10;
// Bytes that the loop reads for one connection before it serves others.
constexpr size_t kTurn = size_t{256} << 10;

base::Error broken(int code) {
  return {base::ErrorKind::kPeerLost,
          code == 0 ? "the bulk connection is closed" : std::string("bulk: ") + uv_strerror(-code)};
}

}  // namespace

// ---- BulkSocket ----

bool BulkSocket::open(Loop& loop, Fd socket) {
  std::lock_guard lock(mutex_);
  if (loop_) return false;
  if (closed_) return true;
  loop_ = loop.impl();
  is_tcp_ = socket_option(socket.get(), SOL_SOCKET, SO_DOMAIN) != AF_UNIX;
  fd_ = socket.release();
  loop_->post([self = shared_from_this()] {
    self->loop_->hold_on_loop(self);
    {
      std::lock_guard opening(self->mutex_);
      if (self->fd_ < 0) return;  // the loop is ending
      self->poll_.data = self.get();
      self->is_polled_ = uv_poll_init(&self->loop_->uv, &self->poll_, self->fd_) == 0;
    }
    self->is_polled_ ? self->watch_on_loop() : self->break_on_loop(broken(ENOMEM));
  });
  return true;
}

void BulkSocket::watch_on_loop() {
  std::lock_guard lock(mutex_);
  if (!is_polled_) return;
  const int events = closed_ ? 0 : wanted_events_locked();
  if (events == 0) {
    uv_poll_stop(&poll_);
    return;
  }
  uv_poll_start(&poll_, events, [](uv_poll_t* handle, int, int) noexcept {
    const auto self = static_cast<BulkSocket*>(handle->data)->shared_from_this();
    self->on_ready_on_loop();  // reading and writing report errors
    self->watch_on_loop();
  });
}

void BulkSocket::break_on_loop(const base::Error& error) {
  const OnBroken on_broken = std::exchange(on_broken_, {});
  shut_down_on_loop();
  if (on_broken) on_broken(error);
}

void BulkSocket::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  if (loop_) loop_->post([self = shared_from_this()] { self->shut_down_on_loop(); });
}

void BulkSocket::shut_down_on_loop() {
  if (std::exchange(is_shut_down_, true)) return;
  {
    std::unique_lock lock(mutex_);
    closed_ = true;
    left_.wait(lock, [this] { return !is_writing_; });  // for the rest of a slice at most
    if (is_polled_) uv_poll_stop(&poll_);               // before the descriptor is closed
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  drop_on_loop();
  on_broken_ = {};
  if (!std::exchange(is_polled_, false)) return loop_->release_on_loop(this);
  uv_close(reinterpret_cast<uv_handle_t*>(&poll_), [](uv_handle_t* handle) noexcept {
    auto* const self = static_cast<BulkSocket*>(handle->data);
    self->loop_->release_on_loop(self);
  });
}

// ---- BulkSender ----

void BulkSender::write_until(const PendingFrame* own) {
  int code = 0;
  base::Task when_empty;
  std::unique_lock lock(mutex_);
  if (is_writing_ || closed_ || fd_ < 0) return;  // the thread that writes sees what was pushed
  is_writing_ = true;
  for (bool is_last = false; code == 0 && !is_last && !closed_ && !queue_.empty();) {
    PendingFrame* const front = queue_.front().get();
    lock.unlock();
    code = front->write_to(fd_, is_tcp_ ? kTcpWriteSlice : kUnixSlice);
    lock.lock();
    is_last = !own;
    if (!front->done()) continue;
    is_last = !own || front == own;
    std::unique_ptr<PendingFrame> done = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    done = nullptr;  // without the lock
    lock.lock();
  }
  is_writing_ = false;
  left_.notify_all();
  if (closed_) return;
  if (queue_.empty()) when_empty = std::move(when_empty_);
  if (code != 0 && code != EAGAIN) {
    break_later(broken(code));
  } else if (!queue_.empty() && !loop_->in_loop()) {
    watch_later();
  }
  lock.unlock();
  if (when_empty) when_empty();
}

void BulkSender::call_when_empty(base::Task task) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    if (!queue_.empty() || is_writing_) {
      when_empty_ = std::move(task);
      return;
    }
  }
  task();
}

void BulkSender::drop_on_loop() {
  decltype(queue_) dropped;  // destroyed without the lock, as `task`
  base::Task task;
  std::lock_guard lock(mutex_);
  dropped.swap(queue_);
  task = std::move(when_empty_);
}

// ---- BulkReceiver ----

void BulkReceiver::expect(uint64_t bytes, std::function<void(base::BufferPtr)> done) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  queue_.push_back({bytes, std::move(done)});
  if (queue_.size() == 1 && loop_) watch_later();
}

void BulkReceiver::on_ready_on_loop() {
  for (size_t taken = 0; taken < kTurn;) {
    Payload* first = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (closed_ || queue_.empty()) return;
      first = &queue_.front();
      if (taken > 0) last_heard_ = loop_->now_on_loop();
    }
    if (!first->body) first->body = loop_->buffers.allocate(first->bytes);
    if (!first->body) {
      return break_on_loop(
          {base::ErrorKind::kResources,
           "no memory for a message of " + std::to_string(first->bytes) + " bytes"});
    }
    const size_t room =
        std::min<uint64_t>(first->bytes - first->filled, is_tcp_ ? kTcpReadSlice : kUnixSlice);
    const ssize_t bytes = ::recv(fd_, first->body->data + first->filled, room, MSG_DONTWAIT);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes <= 0) return break_on_loop(broken(bytes < 0 ? errno : 0));
    taken += static_cast<size_t>(bytes);
    first->filled += static_cast<size_t>(bytes);
    if (first->filled < first->bytes) continue;
    Payload whole;
    {
      std::lock_guard lock(mutex_);
      whole = std::move(*first);
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

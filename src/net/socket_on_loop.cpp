#include <cerrno>
#include <cstring>

#include <sys/socket.h>
#include <uv.h>

#include "net_impl.h"

namespace distrain::net {
namespace {

// Wait before retrying a full unix listener, because poll() does not report room in its backlog.
constexpr auto kBacklogPause = std::chrono::milliseconds(5);

/// One attempt to connect to one address. States: trying → waiting (socket or backlog) → ended.
class Connector final : public LoopResource, public std::enable_shared_from_this<Connector> {
 public:
  Connector(std::shared_ptr<Loop::Impl> loop, std::string where, sockaddr_storage address,
            socklen_t size, OnConnected done)
      : loop_(std::move(loop)),
        where_(std::move(where)),
        address_(address),
        size_(size),
        done_(std::move(done)) {}

  void begin_on_loop(base::TimePoint deadline) {
    socket_ = open_socket(address_.ss_family);
    if (!socket_.valid()) return done_(socket_error(where_, errno));
    if (uv_poll_init(&loop_->uv, &poll_, socket_.get()) < 0) {
      return done_(socket_error(where_, ENOMEM));
    }
    poll_.data = this;
    loop_->hold_on_loop(shared_from_this());
    timer_ =
        loop_->call_at(deadline, [self = shared_from_this()] { self->end_on_loop(ETIMEDOUT); });
    try_on_loop();
  }

  void shut_down_on_loop() override {
    done_ = {};  // must not be called when the loop ends
    end_on_loop(ECANCELED);
  }

 private:
  void try_on_loop() {
    if (ended_) return;
    if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address_), size_) == 0) {
      return end_on_loop(0);
    }
    if (errno == EINPROGRESS || errno == EINTR) {
      uv_poll_start(&poll_, UV_WRITABLE, [](uv_poll_t* handle, int, int) noexcept {
        auto* const self = static_cast<Connector*>(handle->data);
        self->end_on_loop(socket_option(self->socket_.get(), SOL_SOCKET, SO_ERROR));
      });
    } else if (errno == EAGAIN) {
      loop_->call_at(base::Clock::now() + kBacklogPause,
                     [self = shared_from_this()] { self->try_on_loop(); });
    } else {
      end_on_loop(errno);
    }
  }

  void end_on_loop(int code) {
    if (std::exchange(ended_, true)) return;
    loop_->note_activity_on_loop();
    loop_->cancel(timer_);
    if (code == 0 && is_connected_to_itself(socket_.get())) code = ECONNREFUSED;
    code_ = code;
    // Call done_ with the socket only in the close callback, because libuv uses it until then.
    uv_close(reinterpret_cast<uv_handle_t*>(&poll_), [](uv_handle_t* handle) noexcept {
      auto* self = static_cast<Connector*>(handle->data);
      const auto kept = self->shared_from_this();
      self->loop_->release_on_loop(self);
      const OnConnected done = std::move(self->done_);
      if (!done) return;
      if (self->code_ == 0) return done(std::move(self->socket_));
      self->socket_.reset();
      done(socket_error(self->where_, self->code_));
    });
  }

  const std::shared_ptr<Loop::Impl> loop_;
  const std::string where_;
  const sockaddr_storage address_;
  const socklen_t size_;
  OnConnected done_;
  Fd socket_;
  uv_poll_t poll_;
  uint64_t timer_ = 0;
  bool ended_ = false;
  int code_ = 0;
};

void connect_on_loop(Loop& loop, std::string where, const void* address, socklen_t size,
                     base::TimePoint deadline, OnConnected done) {
  sockaddr_storage storage{};
  std::memcpy(&storage, address, size);
  std::make_shared<Connector>(loop.impl(), std::move(where), storage, size, std::move(done))
      ->begin_on_loop(deadline);
}

}  // namespace

void connect_tcp_on_loop(Loop& loop, const std::string& host, uint16_t port,
                         base::TimePoint deadline, OnConnected done) {
  loop.impl()->assert_in_loop();
  const auto found = resolve(host, port, AI_NUMERICHOST);
  if (!found.ok()) return done(found.error());
  const addrinfo& first = *found.unchecked();
  connect_on_loop(loop, "connecting to " + endpoint_text(host, port), first.ai_addr,
                  first.ai_addrlen, deadline, std::move(done));
}

void connect_unix_on_loop(Loop& loop, const std::string& path, base::TimePoint deadline,
                          OnConnected done) {
  loop.impl()->assert_in_loop();
  const auto where = unix_address(path);
  if (!where.ok()) return done(where.error());
  const auto& [address, size] = where.unchecked();
  connect_on_loop(loop, "connecting to " + path, &address, size, deadline, std::move(done));
}

// If no descriptor is left, accepting pauses; else the readable socket would keep the loop busy.
constexpr auto kPauseWithoutDescriptors = std::chrono::milliseconds(100);

struct Listener::State final : LoopResource, std::enable_shared_from_this<Listener::State> {
  State(std::shared_ptr<Loop::Impl> l, Fd s, std::function<void(Fd)> on)
      : loop(std::move(l)), socket(std::move(s)), on_connection(std::move(on)) {}

  void open_on_loop() {
    if (closed) return;
    if (uv_poll_init(&loop->uv, &poll, socket.get()) < 0) return;
    poll.data = this;
    opened = true;
    loop->hold_on_loop(shared_from_this());
    if (!closed) resume_on_loop();
  }

  void set_accepting_on_loop(bool accepts) {
    loop->assert_in_loop();
    accepting = accepts;
    if (!opened || closed) return;
    if (accepts) return resume_on_loop();
    uv_poll_stop(&poll);
  }

  void resume_on_loop() {
    if (closed || !accepting) return;
    uv_poll_start(&poll, UV_READABLE, [](uv_poll_t* handle, int, int) noexcept {
      static_cast<State*>(handle->data)->accept_on_loop();
    });
  }

  void accept_on_loop() {
    loop->note_activity_on_loop();
    while (!closed && accepting) {
      Fd fd(::accept4(socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (fd.valid()) {
        on_connection(std::move(fd));
        continue;
      }
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      uv_poll_stop(&poll);
      loop->call_at(base::Clock::now() + kPauseWithoutDescriptors,
                    [self = shared_from_this()] { self->resume_on_loop(); });
      return;
    }
  }

  void shut_down_on_loop() override {
    if (std::exchange(closed, true)) return;
    if (!opened) return;
    uv_close(reinterpret_cast<uv_handle_t*>(&poll), [](uv_handle_t* handle) noexcept {
      auto* self = static_cast<State*>(handle->data);
      self->socket.reset();
      self->loop->release_on_loop(self);
    });
  }

  const std::shared_ptr<Loop::Impl> loop;
  Fd socket;
  std::function<void(Fd)> on_connection;
  uv_poll_t poll;
  bool opened = false;
  bool closed = false;
  bool accepting = true;
};

Listener::Listener(Loop& loop, Fd socket, std::function<void(Fd)> on_connection)
    : state_(std::make_shared<State>(loop.impl(), std::move(socket), std::move(on_connection))) {
  state_->loop->post([state = state_] { state->open_on_loop(); });
}

Listener::~Listener() {
  if (state_->loop->in_loop()) {
    state_->shut_down_on_loop();
  } else {
    state_->loop->post([state = state_] { state->shut_down_on_loop(); });
  }
}

void Listener::set_accepting_on_loop(bool accepts) { state_->set_accepting_on_loop(accepts); }

}  // namespace distrain::net

#include <cerrno>

#include <sys/socket.h>
#include <uv.h>

#include "distrain/net/socket.h"
#include "loop_impl.h"

namespace distrain::net {

// If no descriptor is left, the connection stays in the backlog and the socket stays readable.
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
    if (accepts) {
      resume_on_loop();
    } else {
      uv_poll_stop(&poll);
    }
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
    if (closed) return;
    closed = true;
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

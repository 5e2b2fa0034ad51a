#include "control/doorway.h"

#include <cerrno>

#include <sys/random.h>

namespace distrain::rpc::control {

namespace {

constexpr auto kLastLook = std::chrono::milliseconds(50);
// All ranks of a large job come at the same moment.
constexpr size_t kMaxStrangers = 1024;

}  // namespace

void Doorway::listen(net::Fd socket) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return;
  listeners_.push_back(std::make_unique<net::Listener>(
      loop_, std::move(socket), [weak = weak_from_this()](net::Fd fd) {
        if (const auto self = weak.lock()) self->on_connection_on_loop(std::move(fd));
      }));
}

void Doorway::close() {
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    listeners_.clear();
  }
  loop_.post([self = shared_from_this()] {
    while (!self->strangers_.empty()) self->show_the_door_on_loop(self->strangers_.begin());
  });
}

void Doorway::on_connection_on_loop(net::Fd socket) {
  if (strangers_.size() == kMaxStrangers) show_the_door_on_loop(strangers_.begin());
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  const Place place = strangers_.insert(strangers_.end(), {stream, 0});
  const auto weak = weak_from_this();
  place->timer = loop_.call_at(base::deadline_after(patience_), [weak, place] {
    if (const auto self = weak.lock()) self->look_once_more_on_loop(place);
  });
  stream->start({[weak, place](const net::InFrame& frame) {
                   if (const auto self = weak.lock()) self->on_hello_on_loop(place, frame);
                 },
                 [weak, place](const base::Error&) {
                   if (const auto self = weak.lock()) self->show_the_door_on_loop(place);
                 }},
                wire::kHandshakeLimits);
}

// A loop that was late, as its process was stopped, runs its timers before it looks at its sockets,
// where the hello may be.
void Doorway::look_once_more_on_loop(Place place) {
  place->timer = loop_.call_at(base::deadline_after(kLastLook), [weak = weak_from_this(), place] {
    if (const auto self = weak.lock()) self->show_the_door_on_loop(place);
  });
}

// `place` is no more after this: nothing that still comes from there is listened to.
void Doorway::show_the_door_on_loop(Place place) {
  loop_.cancel(place->timer);
  const net::StreamPtr stream = std::move(place->stream);
  strangers_.erase(place);
  stream->set_handler_on_loop({});
  stream->close(false);
}

void Doorway::on_hello_on_loop(Place place, const net::InFrame& frame) {
  loop_.cancel(place->timer);
  const net::StreamPtr stream = std::move(place->stream);
  strangers_.erase(place);
  stream->set_handler_on_loop({});
  std::optional<base::Error> refusal;
  try {
    if (frame.header.kind != wire::FrameKind::kHello) {
      wire::Reader::fail("a connection must begin with hello");
    }
    refusal = admit_(stream, wire::decode_hello(frame.meta));
  } catch (const base::Exception& e) {
    refusal = e.error();
    refusal->op = "join";
  }
  if (!refusal) return;
  net::OutFrame answer;
  answer.header.kind = wire::FrameKind::kReject;
  answer.meta = wire::encode(*refusal);
  static_cast<void>(stream->send(std::move(answer)));
  stream->close();
}

std::string new_secret() {
  std::string secret(16, '\0');
  size_t have = 0;
  while (have < secret.size()) {
    const ssize_t got = getrandom(secret.data() + have, secret.size() - have, 0);
    if (got > 0) have += static_cast<size_t>(got);
    if (got < 0 && errno != EINTR) {
      throw base::Exception(base::ErrorKind::kResources, "the system has no random bytes");
    }
  }
  return secret;
}

std::string new_unix_name() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string name = "@distrain-";
  for (const char byte : new_secret()) {
    name += kDigits[static_cast<unsigned char>(byte) >> 4];
    name += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return name;
}

}  // namespace distrain::rpc::control

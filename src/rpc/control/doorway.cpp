#include "control/doorway.h"

#include <algorithm>
#include <cerrno>

#include <sys/random.h>
#include <sys/resource.h>

namespace distrain::rpc::control {

namespace {

constexpr auto kLastLook = std::chrono::milliseconds(50);
// All ranks of a large job come at the same moment, and whoever stands here holds a descriptor that
// this process needs for other things.
constexpr rlim_t kMaxStrangers = 1024;

size_t most_strangers() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMaxStrangers;
  return std::clamp<rlim_t>(limit.rlim_cur / 4, 1, kMaxStrangers);
}

}  // namespace

Doorway::Doorway(net::Loop& loop, base::Duration patience, Admit admit)
    : loop_(loop), patience_(patience), admit_(std::move(admit)), most_(most_strangers()) {}

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
    while (!self->strangers_.empty()) {
      self->show_the_door_on_loop(self->strangers_.begin()->first);
    }
  });
}

void Doorway::on_connection_on_loop(net::Fd socket) {
  if (strangers_.size() == most_) show_the_door_on_loop(strangers_.begin()->first);
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  const uint64_t number = ++newest_;
  const auto weak = weak_from_this();
  const uint64_t timer = loop_.call_at(base::deadline_after(patience_), [weak, number] {
    if (const auto self = weak.lock()) self->look_once_more_on_loop(number);
  });
  strangers_.emplace(number, Stranger{stream, timer});
  stream->start({[weak, number](const net::InFrame& frame) {
                   if (const auto self = weak.lock()) self->on_hello_on_loop(number, frame);
                 },
                 [weak, number](const base::Error&) {
                   if (const auto self = weak.lock()) self->show_the_door_on_loop(number);
                 }},
                wire::kHandshakeLimits);
}

net::StreamPtr Doorway::take_on_loop(uint64_t number) {
  const auto it = strangers_.find(number);
  if (it == strangers_.end()) return nullptr;
  loop_.cancel(it->second.timer);
  const net::StreamPtr stream = std::move(it->second.stream);
  strangers_.erase(it);
  return stream;
}

// A loop that was late, as its process was stopped, runs its timers before it looks at its sockets,
// where the hello may be.
void Doorway::look_once_more_on_loop(uint64_t number) {
  const auto it = strangers_.find(number);
  if (it == strangers_.end()) return;
  const auto weak = weak_from_this();
  it->second.timer = loop_.call_at(base::deadline_after(kLastLook), [weak, number] {
    if (const auto self = weak.lock()) self->show_the_door_on_loop(number);
  });
}

void Doorway::show_the_door_on_loop(uint64_t number) {
  if (const net::StreamPtr stream = take_on_loop(number)) stream->close(false);
}

void Doorway::on_hello_on_loop(uint64_t number, const net::InFrame& frame) {
  const net::StreamPtr stream = take_on_loop(number);
  if (!stream) return;
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

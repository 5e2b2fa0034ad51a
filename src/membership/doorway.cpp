#include "doorway.h"

#include <algorithm>
#include <utility>

#include <sys/resource.h>
#include <unistd.h>

#include "greeting.h"

namespace distrain::membership {

namespace {

using base::Error;
using base::ErrorKind;
using base::Exception;

constexpr auto kCrowded = std::chrono::milliseconds(100);  // until the oldest connection is closed
constexpr auto kLongestJoin = std::chrono::seconds(60);    // for a proved rank's join message
// Each open connection uses a descriptor that this process needs for other purposes.
constexpr rlim_t kMaxStrangers = 64;

size_t most_strangers() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMaxStrangers;
  return std::clamp<rlim_t>(limit.rlim_cur / 4, 1, kMaxStrangers);
}

void expect(wire::FrameKind kind, const net::InFrame& frame) {
  if (frame.header.kind != kind) wire::Reader::fail("a frame out of place");
}

}  // namespace

Doorway::Doorway(net::Loop& loop, base::Duration patience, Callbacks callbacks)
    : loop_(loop), patience_(patience), callbacks_(std::move(callbacks)), most_(most_strangers()) {}

void Doorway::listen(net::Fd socket) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return;
  listeners_.push_back(std::make_shared<net::Listener>(
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
    for (Strangers* all : {&self->strangers_, &self->believed_}) {
      while (!all->empty()) self->show_the_door_on_loop(all->begin()->first);
    }
  });
}

// ---- connections come and go ----

void Doorway::on_connection_on_loop(net::Fd socket) {
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  const uint64_t number = ++newest_;
  Stranger& stranger = strangers_[number];
  stranger.stream = stream;
  stranger.came = base::Clock::now();
  stranger.timer = show_the_door_later_on_loop(number, patience_);
  const auto weak = weak_from_this();
  stream->start({[weak, number](const net::InFrame& frame) {
                   if (const auto self = weak.lock()) self->on_frame_on_loop(number, frame);
                 },
                 [weak, number](const Error& error) {
                   if (const auto self = weak.lock()) self->on_closed_on_loop(number, error);
                 }},
                wire::kHelloLimits);
  see_to_crowd_on_loop();
}

void Doorway::on_closed_on_loop(uint64_t number, const Error& error) {
  const auto believed = believed_.find(number);
  if (believed != believed_.end() && error.kind == ErrorKind::kProtocol) {
    report_on_loop(believed->second, error);  // a proved rank's frame was corrupted
  }
  // A process with a token does not prove it to a rank that has none, and closes instead.
  const auto stranger = strangers_.find(number);
  if (stranger != strangers_.end() && stranger->second.stage == Stage::kProof) {
    const wire::Hello& other = stranger->second.responder->other();
    const auto credentials = callbacks_.credentials(other.purpose);
    if (credentials && other.trust != credentials->self.trust) {
      report_on_loop(stranger->second, {ErrorKind::kAuth, "another kind of trust"});
    }
  }
  show_the_door_on_loop(number);
}

void Doorway::see_to_crowd_on_loop() {
  const bool was_full = std::exchange(is_full_, strangers_.size() >= most_);
  if (is_full_ || was_full) {
    std::lock_guard lock(mutex_);
    for (const auto& listener : listeners_) listener->set_accepting_on_loop(!is_full_);
  }
  if (crowd_timer_ != 0) loop_.cancel(std::exchange(crowd_timer_, 0));
  if (!is_full_) return;
  const auto oldest = strangers_.begin();
  crowd_timer_ = loop_.call_at(oldest->second.came + kCrowded,
                               [weak = weak_from_this(), number = oldest->first] {
                                 const auto self = weak.lock();
                                 if (!self) return;
                                 self->crowd_timer_ = 0;
                                 self->show_the_door_on_loop(number);
                               });
}

net::StreamPtr Doorway::take_on_loop(uint64_t number) {
  for (Strangers* all : {&strangers_, &believed_}) {
    const auto it = all->find(number);
    if (it == all->end()) continue;
    loop_.cancel(it->second.timer);
    net::StreamPtr stream = std::move(it->second.stream);
    all->erase(it);
    see_to_crowd_on_loop();
    return stream;
  }
  return nullptr;
}

uint64_t Doorway::show_the_door_later_on_loop(uint64_t number, base::Duration patience) {
  const auto weak = weak_from_this();
  return loop_.call_at(base::deadline_after(patience), [weak, number] {
    const auto self = weak.lock();
    if (!self) return;
    for (Strangers* all : {&self->strangers_, &self->believed_}) {
      const auto it = all->find(number);
      if (it == all->end()) continue;
      it->second.timer = self->loop_.call_at(base::deadline_after(kLastLook), [weak, number] {
        if (const auto later = weak.lock()) later->show_the_door_on_loop(number);
      });
    }
  });
}

void Doorway::show_the_door_on_loop(uint64_t number) {
  if (const net::StreamPtr stream = take_on_loop(number)) stream->close(false);
}

// ---- frames ----

void Doorway::on_frame_on_loop(uint64_t number, const net::InFrame& frame) {
  if (believed_.contains(number)) return on_join_on_loop(number, frame);
  const auto it = strangers_.find(number);
  if (it == strangers_.end()) return;
  try {
    const Stage stage = it->second.stage;
    if (stage == Stage::kHello) return on_hello_on_loop(it->second, frame);
    if (stage == Stage::kProof) return on_proof_on_loop(number, it->second, frame);
  } catch (const Exception& e) {
    // This process is about to end.
    if (e.error().kind == ErrorKind::kCancelled) return show_the_door_on_loop(number);
    const auto stranger = strangers_.find(number);  // it may have been removed
    if (stranger != strangers_.end()) refuse_on_loop(stranger->second, e.error());
  }
}

void Doorway::on_hello_on_loop(Stranger& stranger, const net::InFrame& frame) {
  expect(wire::FrameKind::kHello, frame);
  const wire::Hello hello = wire::decode_hello(frame.meta);
  const auto credentials = callbacks_.credentials(hello.purpose);
  if (!credentials) wire::Reader::fail("a connection that nobody expects");
  stranger.responder.emplace(*credentials, hello);
  stranger.stage = Stage::kProof;
  stranger.stream->set_limits_on_loop(wire::kProofLimits);
  say(stranger.stream, wire::FrameKind::kHello, stranger.responder->hello());
}

void Doorway::on_proof_on_loop(uint64_t number, Stranger& stranger, const net::InFrame& frame) {
  expect(wire::FrameKind::kProof, frame);
  const wire::Hello hello = stranger.responder->other();
  const auto credentials = callbacks_.credentials(hello.purpose);
  if (!credentials) return show_the_door_on_loop(number);  // this rank is leaving
  const wire::Proof own = stranger.responder->check(frame.meta);
  const wire::Trust trust = credentials->self.trust;
  const bool is_local_only =
      trust == wire::Trust::kSameUser && hello.purpose == wire::HelloPurpose::kJoin;
  if (hello.trust != trust ||
      (is_local_only && stranger.stream->peer_user_on_loop() != geteuid())) {
    throw Exception(ErrorKind::kAuth, "somebody whom this rank does not trust");
  }
  say(stranger.stream, wire::FrameKind::kProof, {own.begin(), own.end()});
  if (const auto why = mismatch(credentials->self, hello)) {
    report_on_loop(stranger, *why);
    return reject_on_loop(take_on_loop(number), *why);
  }
  if (hello.purpose == wire::HelloPurpose::kPeer) {
    return admit_on_loop(take_on_loop(number), {hello.purpose, hello.rank, hello.incarnation});
  }
  const uint64_t timer = stranger.timer;
  stranger.stream->set_limits_on_loop(wire::kJoinLimits);
  believed_.insert(strangers_.extract(number));
  loop_.cancel(timer);
  believed_.at(number).timer = show_the_door_later_on_loop(number, kLongestJoin);
  see_to_crowd_on_loop();
}

void Doorway::on_join_on_loop(uint64_t number, const net::InFrame& frame) {
  const int rank = believed_.at(number).responder->other().rank;
  const net::StreamPtr stream = take_on_loop(number);
  try {
    expect(wire::FrameKind::kJoin, frame);
    admit_on_loop(stream, {wire::HelloPurpose::kJoin, rank, 0, wire::decode_join(frame.meta)});
  } catch (const Exception& e) {
    reject_on_loop(stream, e.error());
  }
}

void Doorway::admit_on_loop(const net::StreamPtr& stream, Visitor visitor) {
  try {
    const auto refusal = callbacks_.admit(stream, std::move(visitor));
    if (refusal) reject_on_loop(stream, *refusal);
  } catch (const Exception& e) {
    reject_on_loop(stream, e.error());
  }
}

// ---- refusals ----

void Doorway::reject_on_loop(const net::StreamPtr& stream, Error why) {
  if (why.op.empty()) why.op = "join";
  say(stream, wire::FrameKind::kReject, wire::encode(why));
  stream->close();
}

// Rejects a connection, which counts as open until it is closed.
void Doorway::refuse_on_loop(Stranger& stranger, const Error& why) {
  if (why.kind == ErrorKind::kAuth) report_on_loop(stranger, why);
  stranger.stage = Stage::kRefused;
  reject_on_loop(stranger.stream, refusal_without_reason());
}

void Doorway::report_on_loop(const Stranger& stranger, Error why) {
  const wire::Hello& other = stranger.responder->other();
  const auto credentials = callbacks_.credentials(other.purpose);
  if (why.kind == ErrorKind::kAuth && credentials) {
    why.message = why_not_believed(credentials->self, other);
  }
  callbacks_.on_refused(other.rank, stranger.stream, std::move(why));
}

}  // namespace distrain::membership

#include "handshake.h"

#include <sys/resource.h>
#include <unistd.h>

namespace distrain::membership {
namespace {

constexpr auto kFullTimeout =
    std::chrono::milliseconds(100);                      // when full, oldest connection's lifetime
constexpr auto kJoinTimeout = std::chrono::seconds(60);  // for a proved rank's join message
// Limits the number of unproved connections, because each of them uses a file descriptor.
constexpr rlim_t kMaxUnproved = 64;

size_t max_unproved() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return kMaxUnproved;
  return std::clamp<rlim_t>(limit.rlim_cur / 4, 1, kMaxUnproved);
}

// Additional time before a handshake times out. When a stopped process continues, its loop runs
// timers before it reads sockets, which may already hold the awaited bytes.
constexpr auto kReadGrace = std::chrono::milliseconds(50);

// Sends a frame. Ignores errors, because on_close reports a broken stream.
void send_frame(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes body) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(body);
  static_cast<void>(stream->send(std::move(frame)));
}

void expect(wire::FrameKind kind, const net::InFrame& frame) {
  if (frame.header.kind != kind) wire::Reader::fail("a frame out of place");
}

}  // namespace

Acceptor::Acceptor(net::Loop& loop, base::Duration proof_timeout, Callbacks callbacks)
    : loop_(loop),
      proof_timeout_(proof_timeout),
      callbacks_(std::move(callbacks)),
      max_unproved_(max_unproved()) {}

void Acceptor::close() {
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    listeners_.clear();
  }
  loop_.post([self = shared_from_this()] {
    while (!self->handshakes_.empty()) self->drop_on_loop(self->handshakes_.begin()->first);
  });
}

void Acceptor::on_connection_on_loop(net::Fd socket) {
  const net::StreamPtr stream = net::adopt_socket(loop_, socket.release());
  const uint64_t number = ++last_number_;
  IncomingHandshake& handshake = handshakes_[number];
  handshake.stream = stream;
  handshake.accepted_at = base::Clock::now();
  handshake.timer = drop_later_on_loop(number, proof_timeout_);
  const auto weak = weak_from_this();
  stream->start({[weak, number](const net::InFrame& frame) {
                   if (const auto self = weak.lock()) self->on_frame_on_loop(number, frame);
                 },
                 [weak, number](const Error& error) {
                   if (const auto self = weak.lock()) self->on_closed_on_loop(number, error);
                 }},
                wire::kHelloLimits);
  limit_unproved_on_loop();
}

void Acceptor::on_closed_on_loop(uint64_t number, const Error& error) {
  const auto found = handshakes_.find(number);
  if (found == handshakes_.end()) return;
  const IncomingHandshake& handshake = found->second;
  if (handshake.stage == Stage::kJoin && error.kind == ErrorKind::kProtocol) {
    report_on_loop(handshake, error);  // a proved rank's frame was corrupted
  }
  // A peer with a token sends no proof to a rank without a token, but closes: reports that peer.
  if (handshake.stage == Stage::kProof) {
    const wire::Hello& other = handshake.responder->other();
    const auto credentials = callbacks_.credentials(other.purpose);
    if (credentials && other.trust != credentials->self.trust) {
      report_on_loop(handshake, {ErrorKind::kAuth, "another kind of trust"});
    }
  }
  drop_on_loop(number);
}

void Acceptor::limit_unproved_on_loop() {
  const auto is_unproved = [](const auto& entry) { return entry.second.stage != Stage::kJoin; };
  const auto unproved = static_cast<size_t>(std::ranges::count_if(handshakes_, is_unproved));
  const bool was_full = std::exchange(is_full_, unproved >= max_unproved_);
  if (is_full_ || was_full) {
    std::lock_guard lock(mutex_);
    for (const auto& listener : listeners_) listener->set_accepting_on_loop(!is_full_);
  }
  if (full_timer_ != 0) loop_.cancel(std::exchange(full_timer_, 0));
  if (!is_full_) return;
  const auto oldest = std::ranges::find_if(handshakes_, is_unproved);
  full_timer_ = loop_.call_at(oldest->second.accepted_at + kFullTimeout,
                              [weak = weak_from_this(), number = oldest->first] {
                                const auto self = weak.lock();
                                if (!self) return;
                                self->full_timer_ = 0;
                                self->drop_on_loop(number);
                              });
}

uint64_t Acceptor::drop_later_on_loop(uint64_t number, base::Duration timeout) {
  const auto weak = weak_from_this();
  return loop_.call_at(base::deadline_after(timeout), [weak, number] {
    const auto self = weak.lock();
    if (!self || !self->handshakes_.contains(number)) return;
    self->handshakes_.at(number).timer =
        self->loop_.call_at(base::deadline_after(kReadGrace), [weak, number] {
          if (const auto later = weak.lock()) later->drop_on_loop(number);
        });
  });
}

void Acceptor::on_frame_on_loop(uint64_t number, const net::InFrame& frame) {
  const auto it = handshakes_.find(number);
  if (it == handshakes_.end()) return;
  try {
    switch (it->second.stage) {
      case Stage::kHello:
        return on_hello_on_loop(it->second, frame);
      case Stage::kProof:
        return on_proof_on_loop(number, it->second, frame);
      case Stage::kJoin:
        return on_join_on_loop(number, it->second.responder->other().rank, frame);
      case Stage::kRefused:
        return;
    }
  } catch (const Exception& e) {
    // `cancelled` means that this process is about to end, so nothing is reported.
    if (e.error().kind == ErrorKind::kCancelled) return drop_on_loop(number);
    const auto handshake = handshakes_.find(number);  // end() if it was removed
    if (handshake != handshakes_.end()) refuse_on_loop(handshake->second, e.error());
  }
}

void Acceptor::on_hello_on_loop(IncomingHandshake& handshake, const net::InFrame& frame) {
  expect(wire::FrameKind::kHello, frame);
  const wire::Hello hello = wire::decode_hello(frame.meta);
  const auto credentials = callbacks_.credentials(hello.purpose);
  if (!credentials) wire::Reader::fail("a connection that nobody expects");
  handshake.responder.emplace(*credentials, hello);
  handshake.stage = Stage::kProof;
  handshake.stream->set_limits_on_loop(wire::kProofLimits);
  send_frame(handshake.stream, wire::FrameKind::kHello, handshake.responder->hello());
}

void Acceptor::on_proof_on_loop(uint64_t number, IncomingHandshake& handshake,
                                const net::InFrame& frame) {
  expect(wire::FrameKind::kProof, frame);
  const wire::Hello hello = handshake.responder->other();
  const auto credentials = callbacks_.credentials(hello.purpose);
  if (!credentials) return drop_on_loop(number);  // this rank is leaving the job
  const wire::Proof own = handshake.responder->check(frame.meta);
  const wire::Trust trust = credentials->self.trust;
  const bool is_local_only =
      trust == wire::Trust::kSameUser && hello.purpose == wire::HelloPurpose::kJoin;
  if (hello.trust != trust ||
      (is_local_only && handshake.stream->peer_user_on_loop() != geteuid())) {
    throw Exception(ErrorKind::kAuth, "somebody whom this rank does not trust");
  }
  send_frame(handshake.stream, wire::FrameKind::kProof, {own.begin(), own.end()});
  if (const auto why = mismatch(credentials->self, hello)) {
    report_on_loop(handshake, *why);
    return reject_on_loop(take_on_loop(number), *why);
  }
  if (hello.purpose != wire::HelloPurpose::kJoin) {
    return admit_on_loop(take_on_loop(number), {hello.purpose, hello.rank, hello.incarnation});
  }
  handshake.stream->set_limits_on_loop(wire::kJoinLimits);
  handshake.stage = Stage::kJoin;
  loop_.cancel(handshake.timer);
  handshake.timer = drop_later_on_loop(number, kJoinTimeout);
  limit_unproved_on_loop();
}

void Acceptor::on_join_on_loop(uint64_t number, int rank, const net::InFrame& frame) {
  const net::StreamPtr stream = take_on_loop(number);
  try {
    expect(wire::FrameKind::kJoin, frame);
    admit_on_loop(stream, {wire::HelloPurpose::kJoin, rank, 0, wire::decode_join(frame.meta)});
  } catch (const Exception& e) {
    reject_on_loop(stream, e.error());
  }
}

void Acceptor::admit_on_loop(const net::StreamPtr& stream, AuthenticatedPeer peer) {
  try {
    const auto refusal = callbacks_.admit(stream, std::move(peer));
    if (refusal) reject_on_loop(stream, *refusal);
  } catch (const Exception& e) {
    reject_on_loop(stream, e.error());
  }
}

void Acceptor::reject_on_loop(const net::StreamPtr& stream, Error why) {
  if (why.op.empty()) why.op = "join";
  send_frame(stream, wire::FrameKind::kReject, wire::encode(why));
  stream->close();
}

void Acceptor::report_on_loop(const IncomingHandshake& handshake, Error why) {
  const wire::Hello& other = handshake.responder->other();
  const auto credentials = callbacks_.credentials(other.purpose);
  if (why.kind == ErrorKind::kAuth && credentials) {
    why.message = why_not_trusted(credentials->self, other);
  }
  callbacks_.on_refused(other.rank, handshake.stream, std::move(why));
}

// ---- the side that connects ----

namespace {

struct OutgoingHandshake : std::enable_shared_from_this<OutgoingHandshake> {
  OutgoingHandshake(net::Loop& its_loop, net::StreamPtr its_stream, const Credentials& credentials,
                    wire::HelloPurpose its_purpose)
      : loop(its_loop),
        stream(std::move(its_stream)),
        identity(credentials.self),
        purpose(its_purpose),
        initiator(credentials, its_purpose) {}

  void begin_on_loop() {
    send_frame(stream, wire::FrameKind::kHello, initiator.hello());
    end_after_on_loop(timeouts.hello);
    const auto self = shared_from_this();
    stream->start({[self](const net::InFrame& frame) { self->on_frame_on_loop(frame); },
                   [self](const Error& error) { self->end_on_loop(error); }},
                  wire::kHelloLimits);
  }

  void end_after_on_loop(base::Duration timeout, bool has_grace = true) {
    loop.cancel(timer);
    timer = loop.call_at(base::deadline_after(timeout), [weak = weak_from_this(), has_grace] {
      const auto self = weak.lock();
      if (!self) return;
      if (has_grace) return self->end_after_on_loop(kReadGrace, false);
      self->end_on_loop(Error{ErrorKind::kPeerLost, "it does not answer"});
    });
  }

  void on_frame_on_loop(const net::InFrame& frame) {
    if (!done) return;
    try {
      const wire::FrameKind kind = frame.header.kind;
      if (kind == wire::FrameKind::kReject) return on_reject_on_loop(frame);
      if (kind == wire::FrameKind::kHello && !has_answered) return on_hello_on_loop(frame);
      if (kind == wire::FrameKind::kProof && has_answered) return on_proof_on_loop(frame);
      wire::Reader::fail("a frame out of place");
    } catch (const Exception& e) {
      end_on_loop(e.error());
    }
  }

  void on_hello_on_loop(const net::InFrame& frame) {
    const wire::Proof proof = initiator.answer(frame.meta);
    has_answered = true;
    end_after_on_loop(timeouts.proof);
    is_trusted = is_trusted_on_loop();  // now, because the other side may close next
    const bool is_distrusted = is_trusted == false;
    // Without a token, the proof reveals no secret. Then even a distrusted peer gets the proof, so
    // that it can report to its user why this rank does not join.
    if (!is_distrusted || identity.trust != wire::Trust::kToken) {
      send_frame(stream, wire::FrameKind::kProof, {proof.begin(), proof.end()});
    }
    if (is_distrusted) distrust();
  }

  void on_proof_on_loop(const net::InFrame& frame) {
    initiator.check(frame.meta);
    if (!is_trusted) is_trusted = is_trusted_on_loop();
    if (is_trusted != true) distrust();
    end_on_loop(initiator.other());
  }

  void on_reject_on_loop(const net::InFrame& frame) {
    if (has_answered) distrust();
    // Uses only the text of the error, because the other side has not proved its identity.
    std::string words = wire::decode_error(frame.meta).message;
    std::ranges::replace_if(
        words, [](char letter) { return letter < ' ' || letter > '~'; }, '?');
    throw Exception(ErrorKind::kProtocol,
                    words + ", and this rank version " + std::to_string(wire::kProtocolVersion));
  }

  [[noreturn]] void distrust() const {
    throw Exception(ErrorKind::kAuth, why_not_trusted(identity, initiator.other()));
  }

  // Returns true if the peer is trusted, nullopt if its user is unknown (other host, or closed).
  std::optional<bool> is_trusted_on_loop() const {
    if (initiator.other().trust != identity.trust) return false;
    if (identity.trust != wire::Trust::kSameUser || purpose != wire::HelloPurpose::kJoin) {
      return true;
    }
    const std::optional<uint32_t> user = stream->peer_user_on_loop();
    return user ? std::optional(*user == geteuid()) : std::nullopt;
  }

  void end_on_loop(base::Result<wire::Hello> result) {
    if (!done) return;
    loop.cancel(timer);
    const auto once = std::exchange(done, {});
    if (!result.ok()) stream->close();
    once(std::move(result));
  }

  net::Loop& loop;
  const net::StreamPtr stream;
  const Identity identity;
  const wire::HelloPurpose purpose;
  Initiator initiator;
  HandshakeTimeouts timeouts{};
  std::function<void(base::Result<wire::Hello>)> done;  // empty after it was called
  bool has_answered = false;
  std::optional<bool> is_trusted;
  uint64_t timer = 0;
};

}  // namespace

void shake_hands_on_loop(net::Loop& loop, const net::StreamPtr& stream,
                         const Credentials& credentials, wire::HelloPurpose purpose,
                         HandshakeTimeouts timeouts,
                         std::function<void(base::Result<wire::Hello> other)> done) {
  std::shared_ptr<OutgoingHandshake> handshake;
  try {
    handshake = std::make_shared<OutgoingHandshake>(loop, stream, credentials, purpose);
  } catch (const Exception& e) {  // OpenSSL failed
    stream->close(false);
    return done(e.error());
  }
  handshake->timeouts = timeouts;
  handshake->done = std::move(done);
  handshake->begin_on_loop();
}

}  // namespace distrain::membership

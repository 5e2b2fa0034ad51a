#include "outgoing_handshake.h"

#include <utility>

#include <unistd.h>

#include "handshake_frames.h"

namespace distrain::membership {

void OutgoingHandshake::begin_on_loop(net::Loop& loop, const net::StreamPtr& stream,
                                      const Credentials& credentials, wire::HelloPurpose purpose,
                                      Timeouts timeouts, const Done& done) {
  std::shared_ptr<OutgoingHandshake> self;
  try {
    self = std::make_shared<OutgoingHandshake>(loop, stream, credentials, purpose, timeouts, done);
  } catch (const Exception& e) {  // OpenSSL failed
    stream->close(false);
    return done(e.error());
  }
  send_frame(self->stream_, wire::FrameKind::kHello, self->initiator_.hello());
  self->end_after_on_loop(timeouts.hello);
  self->stream_->start({[self](const net::InFrame& frame) { self->on_frame_on_loop(frame); },
                        [self](const Error& error) { self->end_on_loop(error); }},
                       wire::kHelloLimits);
}

OutgoingHandshake::OutgoingHandshake(net::Loop& loop, net::StreamPtr stream,
                                     const Credentials& credentials, wire::HelloPurpose purpose,
                                     Timeouts timeouts, Done done)
    : loop_(loop),
      stream_(std::move(stream)),
      identity_(credentials.self),
      purpose_(purpose),
      timeouts_(timeouts),
      initiator_(credentials, purpose),
      done_(std::move(done)) {}

void OutgoingHandshake::end_after_on_loop(base::Duration timeout, bool has_grace) {
  loop_.cancel(timer_);
  timer_ = loop_.call_at(base::deadline_after(timeout), [weak = weak_from_this(), has_grace] {
    const auto self = weak.lock();
    if (!self) return;
    if (has_grace) return self->end_after_on_loop(kReadGrace, false);
    self->end_on_loop(Error{ErrorKind::kPeerLost, "it does not answer"});
  });
}

void OutgoingHandshake::on_frame_on_loop(const net::InFrame& frame) {
  if (!done_) return;
  try {
    const wire::FrameKind kind = frame.header.kind;
    if (kind == wire::FrameKind::kReject) return on_reject_on_loop(frame);
    if (kind == wire::FrameKind::kHello && !has_answered_) return on_hello_on_loop(frame);
    if (kind == wire::FrameKind::kProof && has_answered_) return on_proof_on_loop(frame);
    wire::Reader::fail("a frame out of place");
  } catch (const Exception& e) {
    end_on_loop(e.error());
  }
}

void OutgoingHandshake::on_hello_on_loop(const net::InFrame& frame) {
  const wire::Proof proof = initiator_.answer(frame.meta);
  has_answered_ = true;
  end_after_on_loop(timeouts_.proof);
  is_trusted_ = is_trusted_on_loop();  // before the other side can close
  const bool is_distrusted = is_trusted_ == false;
  // Without a secret the proof reveals nothing, and the other side can report whom it refuses.
  if (!is_distrusted || identity_.trust != wire::Trust::kToken) {
    send_frame(stream_, wire::FrameKind::kProof, {proof.begin(), proof.end()});
  }
  if (is_distrusted) distrust();
}

void OutgoingHandshake::on_proof_on_loop(const net::InFrame& frame) {
  initiator_.check(frame.meta);
  if (!is_trusted_) is_trusted_ = is_trusted_on_loop();
  if (is_trusted_ != true) distrust();
  end_on_loop(initiator_.other());
}

void OutgoingHandshake::on_reject_on_loop(const net::InFrame& frame) {
  if (has_answered_) distrust();
  // Only the message is used, because the other side has proved nothing.
  std::string words = wire::decode_error(frame.meta).message;
  for (char& letter : words) {
    if (letter < ' ' || letter > '~') letter = '?';
  }
  throw Exception(ErrorKind::kProtocol,
                  words + ", and this rank version " + std::to_string(wire::kProtocolVersion));
}

void OutgoingHandshake::distrust() const {
  throw Exception(ErrorKind::kAuth, why_not_trusted(identity_, initiator_.other()));
}

std::optional<bool> OutgoingHandshake::is_trusted_on_loop() const {
  if (initiator_.other().trust != identity_.trust) return false;
  if (identity_.trust != wire::Trust::kSameUser || purpose_ != wire::HelloPurpose::kJoin)
    return true;
  const std::optional<uint32_t> user = stream_->peer_user_on_loop();
  if (!user) return std::nullopt;
  return *user == geteuid();
}

void OutgoingHandshake::end_on_loop(base::Result<wire::Hello> result) {
  if (!done_) return;
  loop_.cancel(timer_);
  const Done done = std::exchange(done_, {});
  if (!result.ok()) stream_->close();
  done(std::move(result));
}

}  // namespace distrain::membership

#include "introduction.h"

#include <utility>

#include <unistd.h>

#include "greeting.h"

namespace distrain::membership {

namespace {

using base::Error;
using base::ErrorKind;
using base::Exception;

}  // namespace

void Introduction::begin_on_loop(net::Loop& loop, const net::StreamPtr& stream,
                                 const Credentials& credentials, wire::HelloPurpose purpose,
                                 Patience patience, const Done& done) {
  std::shared_ptr<Introduction> self;
  try {
    self = std::make_shared<Introduction>(loop, stream, credentials, purpose, patience, done);
  } catch (const Exception& e) {  // OpenSSL failed
    stream->close(false);
    return done(e.error());
  }
  say(self->stream_, wire::FrameKind::kHello, self->initiator_.hello());
  self->end_after_on_loop(patience.hello);
  self->stream_->start({[self](const net::InFrame& frame) { self->on_frame_on_loop(frame); },
                        [self](const Error& error) { self->end_on_loop(error); }},
                       wire::kHelloLimits);
}

Introduction::Introduction(net::Loop& loop, net::StreamPtr stream, const Credentials& credentials,
                           wire::HelloPurpose purpose, Patience patience, Done done)
    : loop_(loop),
      stream_(std::move(stream)),
      self_(credentials.self),
      purpose_(purpose),
      patience_(patience),
      initiator_(credentials, purpose),
      done_(std::move(done)) {}

void Introduction::end_after_on_loop(base::Duration patience, bool looks_once_more) {
  loop_.cancel(timer_);
  timer_ =
      loop_.call_at(base::deadline_after(patience), [weak = weak_from_this(), looks_once_more] {
        const auto self = weak.lock();
        if (!self) return;
        if (looks_once_more) return self->end_after_on_loop(kLastLook, false);
        self->end_on_loop(Error{ErrorKind::kPeerLost, "it does not answer"});
      });
}

void Introduction::on_frame_on_loop(const net::InFrame& frame) {
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

void Introduction::on_hello_on_loop(const net::InFrame& frame) {
  const wire::Proof proof = initiator_.answer(frame.meta);
  has_answered_ = true;
  end_after_on_loop(patience_.proof);
  is_trusted_ = is_trusted_on_loop();  // before the other side can close
  const bool is_distrusted = is_trusted_ == false;
  // Without a secret the proof reveals nothing, and the other side can report whom it refuses.
  if (!is_distrusted || self_.trust != wire::Trust::kToken) {
    say(stream_, wire::FrameKind::kProof, {proof.begin(), proof.end()});
  }
  if (is_distrusted) distrust();
}

void Introduction::on_proof_on_loop(const net::InFrame& frame) {
  initiator_.check(frame.meta);
  if (!is_trusted_) is_trusted_ = is_trusted_on_loop();
  if (is_trusted_ != true) distrust();
  end_on_loop(initiator_.other());
}

void Introduction::on_reject_on_loop(const net::InFrame& frame) {
  if (has_answered_) distrust();
  // Only the message is used, because the other side has proved nothing.
  std::string words = wire::decode_error(frame.meta).message;
  for (char& letter : words) {
    if (letter < ' ' || letter > '~') letter = '?';
  }
  throw Exception(ErrorKind::kProtocol,
                  words + ", and this rank version " + std::to_string(wire::kProtocolVersion));
}

void Introduction::distrust() const {
  throw Exception(ErrorKind::kAuth, why_not_believed(self_, initiator_.other()));
}

std::optional<bool> Introduction::is_trusted_on_loop() const {
  if (initiator_.other().trust != self_.trust) return false;
  if (self_.trust != wire::Trust::kSameUser || purpose_ != wire::HelloPurpose::kJoin) return true;
  const std::optional<uint32_t> user = stream_->peer_user_on_loop();
  if (!user) return std::nullopt;
  return *user == geteuid();
}

void Introduction::end_on_loop(base::Result<wire::Hello> result) {
  if (!done_) return;
  loop_.cancel(timer_);
  const Done done = std::exchange(done_, {});
  if (!result.ok()) stream_->close();
  done(std::move(result));
}

}  // namespace distrain::membership

#include "control/introduction.h"

#include <utility>

#include <unistd.h>

#include "control/say.h"

namespace distrain::rpc::control {

namespace {

using base::Error;
using base::ErrorKind;
using base::Exception;

}  // namespace

void Introduction::begin_on_loop(net::Loop& loop, net::StreamPtr stream,
                                 const identity::Credentials& credentials,
                                 wire::HelloPurpose purpose, base::TimePoint deadline, Done done) {
  const auto self = std::make_shared<Introduction>(loop, std::move(stream), credentials, purpose,
                                                   std::move(done));
  say(self->stream_, wire::FrameKind::kHello, self->initiator_.hello());
  self->timer_ = loop.call_at(deadline, [weak = std::weak_ptr(self)] {
    const auto late = weak.lock();
    if (!late) return;
    late->end_on_loop(Error{ErrorKind::kDeadline, "it does not answer", -1, {}});
  });
  self->stream_->start({[self](const net::InFrame& frame) { self->on_frame_on_loop(frame); },
                        [self](const Error& error) { self->end_on_loop(error); }},
                       wire::kHelloLimits);
}

Introduction::Introduction(net::Loop& loop, net::StreamPtr stream,
                           const identity::Credentials& credentials, wire::HelloPurpose purpose,
                           Done done)
    : loop_(loop),
      stream_(std::move(stream)),
      self_(credentials.self),
      purpose_(purpose),
      initiator_(credentials, purpose),
      done_(std::move(done)) {}

void Introduction::on_frame_on_loop(const net::InFrame& frame) {
  if (!done_) return;
  try {
    if (frame.header.kind == wire::FrameKind::kReject) return on_reject_on_loop(frame);
    if (!has_answered_ && frame.header.kind == wire::FrameKind::kHello) {
      return on_hello_on_loop(frame);
    }
    if (!has_answered_ || frame.header.kind != wire::FrameKind::kProof) {
      wire::Reader::fail("a frame out of place");
    }
    initiator_.check(frame.meta);
    end_on_loop(initiator_.other());
  } catch (const Exception& e) {
    end_on_loop(e.error());
  }
}

void Introduction::on_hello_on_loop(const net::InFrame& frame) {
  const wire::Proof proof = initiator_.answer(frame.meta);
  has_answered_ = true;
  const bool is_trusted = is_trusted_on_loop();  // before the other side can close
  // Without a secret the proof tells nobody anything, and the other side can say whom it refuses.
  if (is_trusted || self_.trust != wire::Trust::kToken) {
    say(stream_, wire::FrameKind::kProof, {proof.begin(), proof.end()});
  }
  if (is_trusted) return;
  throw Exception(ErrorKind::kAuth, identity::why_not_believed(self_, initiator_.other()));
}

void Introduction::on_reject_on_loop(const net::InFrame& frame) {
  if (has_answered_) {
    end_on_loop(
        Error{ErrorKind::kAuth, identity::why_not_believed(self_, initiator_.other()), -1, {}});
    return;
  }
  Error error = wire::decode_error(frame.meta);
  error.message += ", and this rank version " + std::to_string(wire::kProtocolVersion);
  end_on_loop(std::move(error));
}

bool Introduction::is_trusted_on_loop() const {
  if (initiator_.other().trust != self_.trust) return false;
  const bool is_local_only =
      self_.trust == wire::Trust::kSameUser && purpose_ == wire::HelloPurpose::kJoin;
  return !is_local_only || stream_->peer_user_on_loop() == geteuid();
}

void Introduction::end_on_loop(base::Result<wire::Hello> result) {
  if (!done_) return;
  loop_.cancel(timer_);
  const Done done = std::exchange(done_, {});
  if (!result.ok()) stream_->close();
  done(std::move(result));
}

}  // namespace distrain::rpc::control

#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/net/stream.h"
#include "proof.h"

namespace distrain::membership {

/// The initiator's side of Note [Identity] on a connection that this rank has made. On the loop.
class OutgoingHandshake : public std::enable_shared_from_this<OutgoingHandshake> {
 public:
  /// Called once: with the proved hello of the other side, when the stream needs a new handler; or
  /// with an error, when the stream is closed. After `peer_lost` (the other side closed without a
  /// message, or did not answer in time) the caller may retry.
  using Done = std::function<void(base::Result<wire::Hello> other)>;

  /// Timeouts for the other side's hello and proof. The proof's is longer, because by then the
  /// other side may have accepted the connection.
  struct Timeouts {
    base::Duration hello;
    base::Duration proof;
  };

  static void begin_on_loop(net::Loop& loop, const net::StreamPtr& stream,
                            const Credentials& credentials, wire::HelloPurpose purpose,
                            Timeouts timeouts, const Done& done);

  OutgoingHandshake(net::Loop& loop, net::StreamPtr stream, const Credentials& credentials,
                    wire::HelloPurpose purpose, Timeouts timeouts, Done done);

 private:
  void on_frame_on_loop(const net::InFrame& frame);
  void on_hello_on_loop(const net::InFrame& frame);
  void on_reject_on_loop(const net::InFrame& frame);
  void on_proof_on_loop(const net::InFrame& frame);
  /// Returns nothing if the peer's user is unknown: it is on another host, or has closed.
  std::optional<bool> is_trusted_on_loop() const;
  [[noreturn]] void distrust() const;
  void end_after_on_loop(base::Duration timeout, bool has_grace = true);
  void end_on_loop(base::Result<wire::Hello> result);

  net::Loop& loop_;
  const net::StreamPtr stream_;
  const Identity identity_;
  const wire::HelloPurpose purpose_;
  const Timeouts timeouts_;
  Initiator initiator_;
  Done done_;  // empty after it was called
  bool has_answered_ = false;
  std::optional<bool> is_trusted_;
  uint64_t timer_ = 0;
};

}  // namespace distrain::membership

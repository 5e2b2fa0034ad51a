#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/net/stream.h"
#include "identity/handshake.h"

namespace distrain::rpc::control {

/// The initiator's part of Note [Identity] on a connection that this rank has made. On the loop.
class Introduction : public std::enable_shared_from_this<Introduction> {
 public:
  /// Told once: what the other side is, which has proved it; then the stream wants another handler,
  /// at once. Or why it is not believed; then the stream is closed. `peer_lost` may be tried again:
  /// it closed the connection without a word, or said nothing in time.
  using Done = std::function<void(base::Result<wire::Hello> other)>;

  /// How long it waits for the other side's hello, and then for its proof: that one may have taken
  /// the connection as it stands by then.
  struct Patience {
    base::Duration hello;
    base::Duration proof;
  };

  static void begin_on_loop(net::Loop& loop, const net::StreamPtr& stream,
                            const identity::Credentials& credentials, wire::HelloPurpose purpose,
                            Patience patience, const Done& done);

  Introduction(net::Loop& loop, net::StreamPtr stream, const identity::Credentials& credentials,
               wire::HelloPurpose purpose, Patience patience, Done done);

 private:
  void on_frame_on_loop(const net::InFrame& frame);
  void on_hello_on_loop(const net::InFrame& frame);
  void on_reject_on_loop(const net::InFrame& frame);
  void on_proof_on_loop(const net::InFrame& frame);
  /// Nothing if that cannot be told: it is on another host, or has closed.
  std::optional<bool> is_trusted_on_loop() const;
  [[noreturn]] void distrust() const;
  void end_after_on_loop(base::Duration patience, bool looks_once_more = true);
  void end_on_loop(base::Result<wire::Hello> result);

  net::Loop& loop_;
  const net::StreamPtr stream_;
  const identity::Self self_;
  const wire::HelloPurpose purpose_;
  const Patience patience_;
  identity::Initiator initiator_;
  Done done_;  // empty once told
  bool has_answered_ = false;
  std::optional<bool> is_trusted_;
  uint64_t timer_ = 0;
};

}  // namespace distrain::rpc::control

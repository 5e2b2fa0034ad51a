#pragma once

#include <functional>
#include <memory>

#include "distrain/base/clock.h"
#include "distrain/base/result.h"
#include "distrain/net/stream.h"
#include "identity/handshake.h"

namespace distrain::rpc::control {

/// The initiator's part of Note [Identity] on a connection that this rank has made. On the loop.
class Introduction : public std::enable_shared_from_this<Introduction> {
 public:
  /// Told once: what the other side is, which has proved it; then the stream wants another handler,
  /// at once. Or why it is not believed; then the stream is closed. `peer_lost` if it closed the
  /// connection without a word, which may be tried again; `deadline` if it said nothing in time.
  using Done = std::function<void(base::Result<wire::Hello> other)>;

  static void begin_on_loop(net::Loop& loop, net::StreamPtr stream,
                            const identity::Credentials& credentials, wire::HelloPurpose purpose,
                            base::TimePoint deadline, Done done);

  Introduction(net::Loop& loop, net::StreamPtr stream, const identity::Credentials& credentials,
               wire::HelloPurpose purpose, Done done);

 private:
  void on_frame_on_loop(const net::InFrame& frame);
  void on_hello_on_loop(const net::InFrame& frame);
  void on_reject_on_loop(const net::InFrame& frame);
  bool is_trusted_on_loop() const;
  void end_on_loop(base::Result<wire::Hello> result);

  net::Loop& loop_;
  const net::StreamPtr stream_;
  const identity::Self self_;
  const wire::HelloPurpose purpose_;
  identity::Initiator initiator_;
  Done done_;  // empty once told
  bool has_answered_ = false;
  uint64_t timer_ = 0;
};

}  // namespace distrain::rpc::control

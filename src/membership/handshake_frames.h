// Shared by Acceptor and OutgoingHandshake, the two sides of a handshake.
#pragma once

#include <chrono>
#include <utility>

#include "distrain/net/stream.h"

namespace distrain::membership {

/// Additional time before a deadline of a handshake takes effect. After a process was stopped, its
/// loop runs timers before it reads sockets, which may already hold the awaited bytes.
inline constexpr auto kReadGrace = std::chrono::milliseconds(50);

/// Sends a frame. If the stream is broken, its on_close is called.
inline void send_frame(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes body) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(body);
  static_cast<void>(stream->send(std::move(frame)));
}

}  // namespace distrain::membership

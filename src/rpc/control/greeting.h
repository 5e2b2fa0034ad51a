// What Doorway and Introduction, the two sides of a handshake, have in common.
#pragma once

#include <chrono>
#include <utility>

#include "distrain/net/stream.h"

namespace distrain::rpc::control {

/// A loop that was late, as its process was stopped, runs its timers before it looks at its
/// sockets, where what was waited for may be. So who has waited long enough waits so much longer.
inline constexpr auto kLastLook = std::chrono::milliseconds(50);

/// Sends a frame of a kind and a body. A broken stream tells its on_close.
inline void say(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes body) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(body);
  static_cast<void>(stream->send(std::move(frame)));
}

}  // namespace distrain::rpc::control

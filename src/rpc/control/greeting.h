// The time and the function that Doorway and Introduction, the sides of a handshake, share.
#pragma once

#include <chrono>
#include <utility>

#include "distrain/net/stream.h"

namespace distrain::rpc::control {

/// Added to each deadline of a handshake, because a loop whose process was stopped runs its timers
/// before it reads its sockets, where the awaited bytes may already be.
inline constexpr auto kLastLook = std::chrono::milliseconds(50);

/// Sends a frame of a kind and a body. A broken stream tells its on_close.
inline void say(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes body) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(body);
  static_cast<void>(stream->send(std::move(frame)));
}

}  // namespace distrain::rpc::control

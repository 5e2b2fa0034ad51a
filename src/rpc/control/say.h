#pragma once

#include <utility>

#include "distrain/net/stream.h"

namespace distrain::rpc::control {

/// Sends a frame of a kind and a body. A broken stream tells its on_close.
inline void say(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes body) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(body);
  static_cast<void>(stream->send(std::move(frame)));
}

}  // namespace distrain::rpc::control

#pragma once

#include <utility>

#include "distrain/net/stream.h"

namespace distrain::rpc::control {

/// A frame that is nothing but a kind and a body. That the stream is broken is told by its
/// on_close.
inline void say(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes body) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(body);
  static_cast<void>(stream->send(std::move(frame)));
}

}  // namespace distrain::rpc::control

#pragma once

#include <string>
#include <utility>

#include "distrain/net/stream.h"

namespace distrain::rpc {

// What both halves of Rendezvous use.

inline base::Error rendezvous_error(std::string message, int rank = -1) {
  return base::Error{base::ErrorKind::kRendezvous, std::move(message), rank, "join"};
}

inline void send_frame(const net::StreamPtr& stream, wire::FrameKind kind, wire::Bytes meta = {}) {
  net::OutFrame frame;
  frame.header.kind = kind;
  frame.meta = std::move(meta);
  static_cast<void>(stream->send(std::move(frame)));  // a broken stream is told by on_close
}

}  // namespace distrain::rpc

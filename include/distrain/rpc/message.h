#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/net/stream.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/frame.h"

namespace distrain::rpc {

/// What is sent: bytes, and beside them the tensors that the bytes refer to by position.
/// Tensors are dense and contiguous CPU tensors by then; only their own elements travel, never the
/// whole storage of a view.
struct OutMessage {
  wire::Bytes body;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;  ///< by tensor, as the sender had it
};

/// What was received. Tensors lie in the receive buffer itself and keep it alive.
struct InMessage {
  wire::FrameHeader header;
  int from = -1;
  std::span<const uint8_t> body;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;  ///< by tensor; empty without an autograd id
  std::shared_ptr<const void> storage;  ///< what `body` points into
};

/// Makes the frame: meta is the tensors' descriptors, with an autograd id one bit a tensor (does it
/// require a gradient), then the body. Tensors stay alive until they are written.
net::OutFrame to_frame(OutMessage message, wire::FrameHeader header);

/// Throws `protocol` if descriptors and payload do not fit together. Makes tensors: not on the loop.
InMessage from_frame(net::InFrame frame, int from);

/// The same without a wire, for a message to oneself; tensors are copied as a wire would.
InMessage to_self(OutMessage message, wire::FrameHeader header, int rank);

}  // namespace distrain::rpc

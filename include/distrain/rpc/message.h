#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/buffer.h"
#include "distrain/net/stream.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/frame.h"

namespace distrain::rpc {

class RRefHandle;

/// An RRef on its way: see Note [RRef protocol] in src/rpc/rref_context.h.
struct RRefTicket {
  uint64_t id = 0;
  int32_t owner = -1;
  uint8_t mode = 0;
  uint64_t fork = 0;    ///< the receiver's
  int32_t parent = -1;  ///< the rank that sends it
};

/// What is sent: bytes, and beside them the tensors and RRefs that the bytes refer to by position.
/// Tensors are dense and contiguous CPU tensors by then; only their own elements travel, never the
/// whole storage of a view.
struct OutMessage {
  wire::Bytes body;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;  ///< by tensor, as the sender had it
  std::vector<RRefTicket> rrefs;
};

/// What was received. Tensors lie in the receive buffer itself and keep it alive.
struct InMessage {
  wire::FrameHeader header;
  int from = -1;
  std::span<const uint8_t> body;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;  ///< by tensor; empty without an autograd id
  std::vector<RRefTicket> tickets;
  /// Those of the tickets, once received. What nobody decodes is let go with the message.
  std::vector<std::shared_ptr<RRefHandle>> rrefs;
  std::shared_ptr<const void> storage;  ///< what `body` points into
};

/// Makes the frame: meta is the tensors' descriptors, with an autograd id one bit a tensor (does it
/// require a gradient), then the RRefs (u32 count, for each u64 id · i32 owner · u8 mode · u64 fork
/// · i32 parent), then the body. Tensors stay alive until they are written.
net::OutFrame to_frame(OutMessage message, wire::FrameHeader header);

/// Throws `protocol` if descriptors and payload do not fit together. Makes tensors: not on the
/// loop.
InMessage from_frame(net::InFrame frame, int from);

/// The same without a wire, for a message to oneself; tensors are copied as a wire would.
InMessage to_self(OutMessage message, wire::FrameHeader header, int rank);

}  // namespace distrain::rpc

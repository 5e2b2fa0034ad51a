#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "distrain/base/buffer.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/device.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/tensor_desc.h"

namespace distrain::rpc {

class Arrivals;
class DeviceStager;
class RRefHandle;

// Note [Tensors of devices]
//
// A tensor's descriptor says on which device of the receiver it is to arrive. Those for the CPU lie
// in the frame's payload. Those for one other device lie packed as one transfer: all of it but the
// last megabyte at the most goes ahead of the message, in kChunk frames of a megabyte each, which
// other frames may come between; the rest goes in the message's payload, behind the tensors for the
// CPU. So the copy of one chunk from the sender's device, the way of the one before over the
// network, and the copy of the one before that to the receiver's device go on at the same time.
// Behind the descriptors and gradient bits of the message stands each transfer's number (u64; 0: it
// had no chunks), in the order in which their devices first come up.

/// An RRef on its way: see Note [RRef protocol] in src/rpc/rref_context.h.
struct RRefTicket {
  uint64_t id = 0;
  uint32_t owner = 0;  ///< its process: Note [Incarnations]
  uint8_t mode = 0;
  uint64_t fork = 0;    ///< the receiver's
  int32_t parent = -1;  ///< the rank that sends it
};

/// What is sent: bytes, and beside them the tensors and RRefs that the bytes refer to by position.
/// Tensors are dense and without gaps by then, never a view's whole storage.
struct OutMessage {
  wire::Bytes body;
  std::vector<at::Tensor> tensors;
  std::vector<wire::DeviceRef> devices;  ///< by tensor: where it arrives
  std::vector<bool> requires_grad;       ///< by tensor, as the sender had it
  std::vector<RRefTicket> rrefs;
};

/// A received message. Its CPU tensors use the receive buffer and keep the buffer alive, except
/// that a tensor that is a small part of the buffer has memory of its own.
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
  /// By device, from when on its tensors are there.
  std::vector<std::pair<c10::Device, StreamPoint>> arrivals;
  uint64_t credit_of_arrivals = 0;  ///< that they took ahead of a call

  /// This thread's current streams go on when the tensors are there. For whoever is to use them.
  void await_arrivals();
};

/// Whether any of its tensors is not on the CPU.
bool has_device_tensors(const OutMessage& message);
std::vector<wire::TensorDesc> describe(const OutMessage& message);

/// Makes the frame: meta is the tensors' descriptors, with an autograd id one bit a tensor (does it
/// require a gradient), the transfers' numbers, then the RRefs (u32 count, for each u64 id · i32
/// owner · u8 mode · u64 fork · i32 parent), then the body. Tensors stay alive until they are
/// written. `transfers` and `rests` are those of Note [Tensors of devices], by device.
net::OutFrame to_frame(OutMessage message, wire::FrameHeader header,
                       const std::vector<uint64_t>& transfers = {},
                       const std::vector<base::BufferPtr>& rests = {});

/// Throws `protocol` if descriptors and payload do not fit together. Makes tensors: not on the
/// loop. `arrivals`: what rank `from` sent ahead; null where it sent nothing. Takes out those of
/// the message, and receives its RRefs if there is a `receiver`, even if it throws.
InMessage from_frame(net::InFrame frame, int from, DeviceStager& stager, Arrivals* arrivals,
                     class RRefContext* receiver = nullptr);

/// The same without a wire, for a message to oneself; tensors are copied as a wire would.
InMessage to_self(OutMessage message, wire::FrameHeader header, int rank);

}  // namespace distrain::rpc

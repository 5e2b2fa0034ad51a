#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distrain/base/buffer.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/device.h"
#include "distrain/wire/codec.h"
#include "distrain/wire/frame.h"
#include "distrain/wire/tensor_desc.h"

namespace distrain::rpc {

class DeviceReceive;
class DeviceStager;
class RRefHandle;

/// Returns the wire number of an element type. Throws `invalid` for types that cannot be sent.
wire::DType to_dtype(at::ScalarType type);
/// Returns the element type for a wire number. Throws `protocol` if the number is unknown.
at::ScalarType to_scalar_type(wire::DType dtype);

/// Returns why `tensor` cannot be sent, such as "a nested tensor", or "" if it can be sent.
std::string kind_that_cannot_be_sent(const at::Tensor& tensor);

// Note [Tensors of devices]
//
// A tensor's descriptor names the receiver's device on which the tensor arrives. CPU tensors lie in
// the frame's payload. The tensors for one accelerator are packed into one transfer. A transfer is
// sent before the message in kChunk frames of one megabyte, between which other frames may be sent.
// Only its last bytes, at most one megabyte, follow the CPU tensors in the payload. So the copies
// on both sides overlap with sending. In the message's meta, each transfer's number (u64; 0 if it
// has no chunks) follows the gradient bits, in the order in which descriptors name devices.

/// An RRef as encoded in a message: see Note [RRef protocol] in src/rpc/rref/rref_context.h.
struct RRefTicket {
  uint64_t id = 0;
  uint32_t owner = 0;  ///< the owning process: Note [Incarnations]
  uint8_t mode = 0;
  uint64_t fork = 0;    ///< the counted reference that the receiver gets
  int32_t parent = -1;  ///< the rank that sent the ticket
};

/// A message to send: a body, and the tensors and RRefs that the body refers to by position. The
/// tensors are dense and without gaps: only the elements of a view are sent, not its storage.
struct OutMessage {
  wire::Bytes body;
  std::vector<at::Tensor> tensors;
  std::vector<wire::DeviceRef> devices;  ///< for each tensor, the device on which it arrives
  std::vector<bool> requires_grad;       ///< for each tensor, on the sender
  std::vector<RRefTicket> rrefs;
};

/// A received message. Its CPU tensors share the receive buffer and keep it alive, except small
/// tensors in a large buffer, which have their own memory.
struct InMessage {
  wire::FrameHeader header;
  int from = -1;
  std::span<const uint8_t> body;
  std::vector<at::Tensor> tensors;
  std::vector<bool> requires_grad;  ///< for each tensor; empty if the autograd id is 0
  std::vector<RRefTicket> tickets;
  /// One for each of `tickets`, created on receipt. Released with the message unless decoded.
  std::vector<std::shared_ptr<RRefHandle>> rrefs;
  std::shared_ptr<const void> storage;  ///< owns the memory of `body`
  bool is_shared = false;               ///< the sender can change the tensors' elements at any time
  /// For each device, the point in a stream at which the tensors on the device are complete.
  std::vector<std::pair<c10::Device, StreamPoint>> completed_at;
  uint64_t credit_of_transfers = 0;  ///< held by the transfers that preceded this call
  /// Makes this thread's current streams wait until the device tensors are complete.
  void await_device_tensors();
};

/// Returns true if a tensor of `message` is not on the CPU.
bool has_device_tensors(const OutMessage& message);
std::vector<wire::TensorDesc> describe(const OutMessage& message);

/// Encodes `message` as a frame, which keeps the tensors alive. The frame's meta contains in turn:
/// the tensors' descriptors; with an autograd id, one bit per tensor (1: it requires a gradient);
/// the numbers of `transfers`; the RRefs (u32 count; for each u64 id · u32 owner · u8 mode · u64
/// fork · i32 parent); the body. `rests` are the transfers' last bytes: Note [Tensors of devices].
net::OutFrame to_frame(OutMessage message, wire::FrameHeader header,
                       const std::vector<uint64_t>& transfers = {},
                       const std::vector<base::BufferPtr>& rests = {});

/// Returns a reader of what Encoder::out wrote into a frame without tensors of devices. Throws
/// `protocol` for others.
wire::Reader body_of(const net::InFrame& frame);

/// Decodes a frame of rank `from`. Throws `protocol` if descriptors and payload do not match. Must
/// not run on the loop, because it allocates tensors. Takes its transfers out of `device_receive`
/// and gives its RRefs to `receiver` (both may be null), even if it throws afterwards.
InMessage from_frame(net::InFrame frame, int from, DeviceStager& stager,
                     DeviceReceive* device_receive, class RRefContext* receiver = nullptr);

/// Converts a message that a rank sends to itself. Copies the tensors, as sending would do.
InMessage to_self(OutMessage message, wire::FrameHeader header, int rank);

}  // namespace distrain::rpc

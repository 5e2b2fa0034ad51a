#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/device_stager.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/message.h"

namespace distrain::rpc {

/// Limits for the blocks of one message: those being copied to, and those queued in the network.
inline constexpr size_t kCopiesAhead = 8;
inline constexpr size_t kMaxSending = 8;

/// Sends a message with tensors on devices.
class DeviceSend {
 public:
  /// Enqueues the first copies, after the work in this thread's current streams. `new_transfer`
  /// returns the number of a new transfer. Throws `invalid` if a transfer is too large.
  DeviceSend(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
             const std::function<uint64_t()>& new_transfer);
  DeviceSend(const DeviceSend&) = delete;
  DeviceSend& operator=(const DeviceSend&) = delete;

  /// Returns the bytes that are not sent yet, as the receiver counts them for credit.
  uint64_t bytes_left() const { return bytes_left_; }

  /// Called before the message itself is sent, whose body it may change; false cancels the message.
  using StillWanted = std::function<bool(wire::Bytes& body)>;

  /// Sends the chunks as their copies complete, then the message. Blocks, so it must not run on the
  /// loop. Returns `cancelled` if `still_wanted` is false. Throws the error of a failed copy.
  base::Status send(const std::function<base::Status(net::OutFrame)>& send,
                    const StillWanted& still_wanted = {});

 private:
  // A part of a transfer. Waits in its destructor because a copy uses the tensors and the block.
  struct Piece {
    ~Piece() { copied.wait_in_destructor(); }
    size_t transfer = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
    base::BufferPtr block;
    StreamPoint copied;
  };
  struct Transfer {
    DeviceGroup group;
    uint64_t id = 0;
    c10::Device device;             // of the sender
    std::vector<at::Tensor> bytes;  // each tensor as flat bytes
  };

  Transfer make_transfer(DeviceGroup group) const;
  std::vector<uint64_t> transfer_ids() const;
  base::Status send_chunks(const std::function<base::Status(net::OutFrame)>& send,
                           const StillWanted& still_wanted);
  net::OutFrame chunk_of(const Transfer& transfer) const;
  void begin_copy(Piece& piece);
  void begin_copies(size_t until);

  DeviceStager& stager_;
  OutMessage message_;
  const wire::FrameHeader header_;
  std::vector<Transfer> transfers_;
  std::vector<Piece> pieces_;  // the chunks of all transfers, then the last piece of each
  size_t chunks_ = 0;          // number of the pieces that are chunks
  uint64_t bytes_left_ = 0;    // a transfer counts with its first chunk
  size_t begun_ = 0;           // pieces whose copy is enqueued
  const std::shared_ptr<BlocksSent> sending_;
};

}  // namespace distrain::rpc

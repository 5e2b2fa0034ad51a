#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device_stager.h"
#include "distrain/net/stream.h"
#include "distrain/rpc/device.h"
#include "distrain/rpc/message.h"

namespace distrain::rpc {

/// Blocks of one message that may be in use at a time: being copied to, and waiting in the network.
inline constexpr size_t kCopiesAhead = 8;
inline constexpr size_t kMaxSending = 8;

/// A message with tensors on devices, on its way out.
class Departure {
 public:
  /// Puts the first copies into the devices' streams, behind what this thread's current streams
  /// have been given. `new_transfer` numbers transfers. Throws `invalid` for too many bytes.
  Departure(DeviceStager& stager, OutMessage message, wire::FrameHeader header,
            const std::function<uint64_t()>& new_transfer);
  Departure(const Departure&) = delete;
  Departure& operator=(const Departure&) = delete;

  /// Bytes that are yet to be sent, as its receiver counts them when they come.
  uint64_t bytes_left() const { return bytes_left_; }

  /// Asked when only the message itself is left to be sent, whose body it may change.
  using StillWanted = std::function<bool(wire::Bytes& body)>;

  /// Sends the chunks as their copies are done, and the message. Blocks: not on the loop.
  /// `cancelled` when it is not wanted any more. Throws what a copy throws.
  base::Status send(const std::function<base::Status(net::OutFrame)>& send,
                    const StillWanted& still_wanted = {});

 private:
  // Of a transfer. The tensors, and the block that is written to, are needed until it is copied.
  struct Piece {
    ~Piece() { copied.settle(); }
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
    std::vector<at::Tensor> bytes;  // each tensor's, flat
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
  std::vector<Piece> pieces_;  // the chunks of all groups; then what goes with the message
  size_t chunks_ = 0;          // of the pieces: go in frames of their own
  uint64_t bytes_left_ = 0;    // a transfer counts with its first chunk
  size_t begun_ = 0;           // pieces whose copy is in its stream
  const std::shared_ptr<BlocksSent> sending_;
};

}  // namespace distrain::rpc

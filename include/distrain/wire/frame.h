#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "distrain/wire/codec.h"

namespace distrain::wire {

/// Frame, the unit of all traffic on a connection. All integers are little-endian.
///
///   offset  size  field
///        0     4  magic            "DTRN" xor a hash of the other 44 bytes (magic_of)
///        4     2  kind             FrameKind; + kInBulk if the payload does not follow
///        6     2  channel          kOneway: channel number; kChunk: device type + 256 * device
///                                  index, + kOfReply if it belongs to a reply; kCall:
///                                  kWithoutCredit, kWithSmallCredit or 0; kReply: kWithRRefs or 0;
///                                  kCredit, kCreditRequest: the receiver's incarnation; otherwise
///                                  0
///        8     4  meta_bytes       length of meta
///       12     4  tensor_count     number of tensor descriptors at the start of meta
///       16     8  payload_bytes    length of the payload, including padding between tensors
///       24     8  call_id          kCall, kReply, kError: matches a reply with its call; kOneway:
///                                  tag a; kChunk: transfer id; kCredit, kCreditRequest: see below
///       32     8  context_id       distributed autograd context, 0: none; kOneway: tag b; kChunk:
///                                  offset in the transfer
///       40     8  autograd_id      pair of send and recv nodes, 0: none; kOneway: tag c; kChunk:
///                                  bytes of the whole transfer
///       48        meta             `tensor_count` TensorDescs (tensor_desc.h), then the body
///        +        zeros            up to a multiple of 64 counted from byte 48; only if
///                                  payload_bytes > 0
///        +        payload          the tensors' elements, each at a multiple of 64, zeros between
///
/// The payload of a frame with kInBulk comes over the sender's bulk connection, as its next
/// `payload_bytes` bytes there, and no zeros follow the meta: Note [Bulk connections] in
/// src/net/bulk.h.
///
/// The hash detects a corrupted header. Without the hash, a reply with a corrupted call_id would be
/// dropped as a reply to an unknown call, and the real caller would wait forever. Meta and payload
/// have no checksum. They are read into one 64-byte aligned buffer, so tensors need no copy.
inline constexpr uint32_t kMagic = 0x4E525444;  // "DTRN"
inline constexpr size_t kHeaderBytes = 48;
inline constexpr uint16_t kWithoutCredit = 1;
inline constexpr uint16_t kWithSmallCredit = 2;
inline constexpr uint16_t kWithRRefs = 1;
inline constexpr uint16_t kOfReply = 128;
inline constexpr uint64_t kInSlot = 1;
inline constexpr uint64_t kWithDescriptor = 2;
inline constexpr uint16_t kInBulk = 0x8000;
/// Smaller payloads follow their headers.
inline constexpr uint64_t kLeastInBulk = (uint64_t{1} << 20) + 1;
inline constexpr uint32_t kProtocolVersion = 11;

enum class FrameKind : uint16_t {
  // Handshake and rendezvous (handshake.h)
  kHello = 1,
  kReject = 2,
  kDirectory = 3,
  kPrepared = 4,
  kGo = 5,
  kProof = 6,
  kJoin = 7,
  kJoined = 8,
  // Shared memory of a stream: Note [Payloads in shared memory] in src/net/arena.h
  kArena = 9,      // comes with the descriptor of memory of `call_id` bytes
  kAttached = 10,  // of the next frame; `autograd_id`: kInSlot + kWithDescriptor; `call_id` and
                   // `context_id`: number and offset of the slot that has its payload
  // Calls
  kCall = 16,
  kReply = 17,
  kError = 18,
  kOneway = 19,
  kChunk = 20,   // part of a message that follows: Note [Tensors of devices] in rpc/message.h
  kCancel = 21,  // the caller of call `call_id` no longer waits
  // Credit for calls: Note [Credit] in src/rpc/flow/credit.h. A kCreditRequest has totals in bytes:
  // `call_id` of spent or returned credit, `context_id` of wanted credit (0: no call waits),
  // `autograd_id` of credit returned unused.
  kCredit = 22,  // grants `call_id` more bytes and sets the window to `context_id` bytes
  kCreditRequest = 23,
  kSmallCredit = 24,  // kCredit and kCreditRequest for the credit of small calls
  kSmallCreditRequest = 25,
  // Liveness of connections and ranks (handshake.h)
  kHeartbeat = 32,
  kFlush = 33,
  kAbort = 34,
  kLost = 35,
  kLeave = 36,
  kReturned = 37,
  kKnown = 38,
  // Reference counts of RRefs
  kRRefFork = 48,
  kRRefAccept = 49,
  kRRefDelete = 50,
};

struct FrameHeader {
  FrameKind kind = FrameKind::kCall;
  uint16_t channel = 0;
  uint32_t meta_bytes = 0;
  uint32_t tensor_count = 0;
  uint64_t payload_bytes = 0;
  uint64_t call_id = 0;
  uint64_t context_id = 0;
  uint64_t autograd_id = 0;
  bool in_bulk = false;
  friend bool operator==(const FrameHeader&, const FrameHeader&) = default;
  /// Returns the offset of the payload from the end of the header.
  uint64_t payload_offset() const {
    return payload_bytes == 0 ? meta_bytes : align_payload(meta_bytes);
  }
  /// Returns the number of bytes between this header and the next one if the payload is not in
  /// bulk.
  uint64_t body_bytes() const { return payload_offset() + payload_bytes; }
  /// Returns the number of bytes between this header and the next one on the stream.
  uint64_t bytes_behind() const { return in_bulk ? meta_bytes : body_bytes(); }
};

/// Returns the magic of a header whose other bytes, as u32, are w[1] to w[11]:
///
///   kMagic ^ ((w[1] * k[1] + ... + w[11] * k[11]) mod 2^64) >> 32
///
/// with the constants of frame.cpp. If one or two bits of a header are flipped, its magic is wrong.
uint32_t magic_of(std::span<const uint8_t, kHeaderBytes> header);

void encode_header(const FrameHeader& header, std::span<uint8_t, kHeaderBytes> out);
/// Fails with `protocol` for a wrong magic, unknown kind, length beyond `limits`, or a short
/// payload with kInBulk. Accepts plain kMagic in kHello and kReject, as sent by earlier versions,
/// so that errors can name the version.
base::Result<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> in,
                                        const Limits& limits);

}  // namespace distrain::wire

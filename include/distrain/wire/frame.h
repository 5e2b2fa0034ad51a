#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "distrain/base/result.h"
#include "distrain/wire/limits.h"

namespace distrain::wire {

/// Frame, the unit of everything on a connection. All integers little-endian.
///
///   offset  size  field
///        0     4  magic            "DTRN", xor a hash of the other 44 bytes (magic_of)
///        4     2  kind             FrameKind
///        6     2  channel          kOneway: the channel's number; kChunk: the device's type and,
///                                  times 256, its index, and 128 if it is of a reply; kCall: 1
///                                  if it took no credit; kReply: 1 if it brings RRefs; kCredit,
///                                  kCreditRequest: the receiver's incarnation; otherwise 0
///        8     4  meta_bytes       length of meta
///       12     4  tensor_count     tensors in the payload; their descriptors begin meta
///       16     8  payload_bytes    length of the payload, paddings between tensors included
///       24     8  call_id          kCall, kReply, kError: pairs them; kOneway: tag a; kChunk: the
///                                  transfer that it is of; of kCredit and kCreditRequest see there
///       32     8  context_id       distributed autograd context, 0: none; kOneway: tag b; kChunk:
///                                  where it begins in the transfer
///       40     8  autograd_id      pair of send and recv nodes, 0: none; kOneway: tag c; kChunk:
///                                  bytes of the whole transfer
///       48        meta             `tensor_count` TensorDescs (tensor_desc.h), then the body
///        +        zeros            up to a multiple of 64 counted from byte 48; only if
///                                  payload_bytes > 0
///        +        payload          the tensors' elements, each at a multiple of 64, zeros between
///
/// A header that was damaged on the way would otherwise be another, valid one: a reply to a call
/// that nobody made, say, while the right caller waits for ever. The body has no check sum.
///
/// The receiver reads meta and payload into one buffer aligned to 64: tensors are used in place.
inline constexpr uint32_t kMagic = 0x4E525444;  // "DTRN"
inline constexpr size_t kHeaderBytes = 48;
inline constexpr uint16_t kWithoutCredit = 1;
inline constexpr uint16_t kWithRRefs = 1;
inline constexpr uint16_t kOfReply = 128;
inline constexpr uint32_t kProtocolVersion = 8;

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
  // Calls
  kCall = 16,
  kReply = 17,
  kError = 18,
  kOneway = 19,
  kChunk = 20,   // of a message that is yet to come: Note [Tensors of devices] in rpc/message.h
  kCancel = 21,  // nobody waits any more for the call `call_id`
  // Note [Credit] in rpc/credit.h:
  kCredit = 22,         // `call_id` bytes more are granted, in windows of `context_id` bytes
  kCreditRequest = 23,  // `call_id` bytes are spent or returned since the beginning, `context_id`
                        // are to be granted (0: nobody waits), `autograd_id` returned unused
  // Life of a connection, and of its ranks (handshake.h)
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

  /// Where the payload begins, counted from the end of the header.
  uint64_t payload_offset() const {
    return payload_bytes == 0 ? meta_bytes : align_payload(meta_bytes);
  }
  /// Bytes that follow the header.
  uint64_t body_bytes() const { return payload_offset() + payload_bytes; }
};

/// What the first four bytes of this header have to be. For w[1] to w[11], its other bytes as u32:
///
///   kMagic ^ ((w[1] * k[1] + ... + w[11] * k[11]) mod 2^64) >> 32
///
/// with the constants of frame.cpp. Any one or two bits that are others make another header of it,
/// which does not fit, whatever the rest is.
uint32_t magic_of(std::span<const uint8_t, kHeaderBytes> header);

void encode_header(const FrameHeader& header, std::span<uint8_t, kHeaderBytes> out);

/// `protocol` for a wrong magic, an unknown kind or a length beyond `limits`. A kHello or kReject
/// may have kMagic itself, as earlier versions of the protocol do: so that they can be named.
base::Result<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> in,
                                        const Limits& limits);

}  // namespace distrain::wire

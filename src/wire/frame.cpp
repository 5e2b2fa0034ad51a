#include "distrain/wire/frame.h"

#include <cstring>
#include <string>

namespace distrain::wire {

namespace {

template <class T>
void store(std::span<uint8_t, kHeaderBytes> out, size_t offset, T value) {
  std::memcpy(out.data() + offset, &value, sizeof value);
}

template <class T>
T load(std::span<const uint8_t, kHeaderBytes> in, size_t offset) {
  T value;
  std::memcpy(&value, in.data() + offset, sizeof value);
  return value;
}

bool is_known(FrameKind kind) {
  switch (kind) {
    case FrameKind::kHello:
    case FrameKind::kReject:
    case FrameKind::kDirectory:
    case FrameKind::kPrepared:
    case FrameKind::kGo:
    case FrameKind::kCall:
    case FrameKind::kReply:
    case FrameKind::kError:
    case FrameKind::kOneway:
    case FrameKind::kChunk:
    case FrameKind::kCancel:
    case FrameKind::kCredit:
    case FrameKind::kCreditRequest:
    case FrameKind::kHeartbeat:
    case FrameKind::kFlush:
    case FrameKind::kAbort:
    case FrameKind::kLost:
    case FrameKind::kLeave:
    case FrameKind::kRRefFork:
    case FrameKind::kRRefAccept:
    case FrameKind::kRRefDelete:
      return true;
  }
  return false;
}

base::Error protocol_error(std::string message) {
  return base::Error{base::ErrorKind::kProtocol, std::move(message), -1, {}};
}

}  // namespace

void encode_header(const FrameHeader& header, std::span<uint8_t, kHeaderBytes> out) {
  store(out, 0, kMagic);
  store(out, 4, static_cast<uint16_t>(header.kind));
  store(out, 6, header.channel);
  store(out, 8, header.meta_bytes);
  store(out, 12, header.tensor_count);
  store(out, 16, header.payload_bytes);
  store(out, 24, header.call_id);
  store(out, 32, header.context_id);
  store(out, 40, header.autograd_id);
}

base::Result<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> in,
                                        const Limits& limits) {
  if (load<uint32_t>(in, 0) != kMagic) {
    return protocol_error("the peer does not speak distrain's protocol (wrong magic)");
  }
  FrameHeader header;
  header.kind = static_cast<FrameKind>(load<uint16_t>(in, 4));
  header.channel = load<uint16_t>(in, 6);
  header.meta_bytes = load<uint32_t>(in, 8);
  header.tensor_count = load<uint32_t>(in, 12);
  header.payload_bytes = load<uint64_t>(in, 16);
  header.call_id = load<uint64_t>(in, 24);
  header.context_id = load<uint64_t>(in, 32);
  header.autograd_id = load<uint64_t>(in, 40);
  if (!is_known(header.kind)) {
    return protocol_error("unknown frame kind " + std::to_string(load<uint16_t>(in, 4)));
  }
  if (header.meta_bytes > limits.max_meta_bytes || header.tensor_count > limits.max_tensors ||
      header.payload_bytes > limits.max_payload_bytes) {
    return protocol_error("a frame beyond the limits: meta " + std::to_string(header.meta_bytes) +
                          " bytes, " + std::to_string(header.tensor_count) + " tensors, payload " +
                          std::to_string(header.payload_bytes) + " bytes");
  }
  return header;
}

}  // namespace distrain::wire

#include "distrain/wire/frame.h"

namespace distrain::wire {
namespace {

// Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
// Flipping one or two bits of the words changes the sum by ±k << a or ±k << a ± l << b, where the
// factors k and l are digits of pi. For these factors, no such change is within 2^32 of a multiple
// of 2^64, so the upper half of the sum changes. A change of ±k << a is also not within 2^32 of
// ±2^(32 + j), so flipping a bit of the magic as well does not hide the change.
constexpr uint64_t kFactors[] = {
    0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89,
    0x452821E638D01377, 0xBE5466CF34E90C6C, 0xC0AC29B7C97C50DD, 0x3F84D5B5B5470917,
    0x9216D5D98979FB1B, 0xD1310BA698DFB5AC, 0x2FFD72DBD01ADFB7,
};

// A header in 64-bit words: the CPU would stall if it read just-written bytes at another width.
using Words = std::array<uint64_t, kHeaderBytes / sizeof(uint64_t)>;

constexpr uint64_t pack(uint64_t low, uint64_t high) { return low | high << 32; }
constexpr auto low(uint64_t word) { return static_cast<uint32_t>(word); }
constexpr auto high(uint64_t word) { return static_cast<uint32_t>(word >> 32); }

uint32_t magic_of(const Words& words) {
  const auto& k = kFactors;
  const uint64_t sum = high(words[0]) * k[0] +                         //
                       low(words[1]) * k[1] + high(words[1]) * k[2] +  //
                       low(words[2]) * k[3] + high(words[2]) * k[4] +  //
                       low(words[3]) * k[5] + high(words[3]) * k[6] +  //
                       low(words[4]) * k[7] + high(words[4]) * k[8] +  //
                       low(words[5]) * k[9] + high(words[5]) * k[10];
  return kMagic ^ high(sum);
}

Words load(std::span<const uint8_t, kHeaderBytes> bytes) {
  Words words;
  std::memcpy(words.data(), bytes.data(), kHeaderBytes);
  return words;
}

// Returns true if `kind` is in one of the four ranges of numbers in use.
bool is_known(FrameKind kind) {
  using enum FrameKind;
  return (kind >= kHello && kind <= kAttached) || (kind >= kCall && kind <= kSmallCreditRequest) ||
         (kind >= kHeartbeat && kind <= kKnown) || (kind >= kRRefFork && kind <= kRRefDelete);
}

base::Error protocol_error(std::string message) {
  return base::Error{base::ErrorKind::kProtocol, std::move(message)};
}

}  // namespace

uint32_t magic_of(std::span<const uint8_t, kHeaderBytes> header) { return magic_of(load(header)); }

void encode_header(const FrameHeader& header, std::span<uint8_t, kHeaderBytes> out) {
  const auto kind = static_cast<uint32_t>(header.kind) | (header.in_bulk ? uint32_t{kInBulk} : 0);
  Words words{pack(0, kind | uint32_t{header.channel} << 16),
              pack(header.meta_bytes, header.tensor_count),
              header.payload_bytes,
              header.call_id,
              header.context_id,
              header.autograd_id};
  words[0] |= magic_of(words);
  std::memcpy(out.data(), words.data(), kHeaderBytes);
}

base::Result<FrameHeader> decode_header(std::span<const uint8_t, kHeaderBytes> in,
                                        const Limits& limits) {
  const Words words = load(in);
  FrameHeader header;
  const auto kind = static_cast<uint16_t>(high(words[0]));
  header.in_bulk = (kind & kInBulk) != 0;
  header.kind = static_cast<FrameKind>(kind & ~kInBulk);
  header.channel = static_cast<uint16_t>(high(words[0]) >> 16);
  header.meta_bytes = low(words[1]);
  header.tensor_count = high(words[1]);
  header.payload_bytes = words[2];
  header.call_id = words[3];
  header.context_id = words[4];
  header.autograd_id = words[5];
  const bool may_be_plain = header.kind == FrameKind::kHello || header.kind == FrameKind::kReject;
  if (low(words[0]) != magic_of(words) && !(may_be_plain && low(words[0]) == kMagic)) {
    return protocol_error("not a distrain frame, or one that was damaged on the way");
  }
  if (!is_known(header.kind)) {
    return protocol_error("unknown frame kind " + std::to_string(kind));
  }
  if (header.meta_bytes > limits.max_meta_bytes || header.tensor_count > limits.max_tensors ||
      header.payload_bytes > limits.max_payload_bytes) {
    return protocol_error("a frame beyond the limits: meta " + std::to_string(header.meta_bytes) +
                          " bytes, " + std::to_string(header.tensor_count) + " tensors, payload " +
                          std::to_string(header.payload_bytes) + " bytes");
  }
  if (header.in_bulk && header.payload_bytes < kLeastInBulk) {
    return protocol_error("a payload of " + std::to_string(header.payload_bytes) +
                          " bytes over a bulk connection");
  }
  return header;
}

}  // namespace distrain::wire

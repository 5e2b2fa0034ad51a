#pragma once

#include <cstddef>
#include <cstdint>

namespace distrain::wire {

/// Upper bounds on the lengths in a peer's header, checked before memory is allocated.
struct Limits {
  uint32_t max_meta_bytes = uint32_t{64} << 20;
  uint32_t max_tensors = 65536;
  uint64_t max_payload_bytes = uint64_t{64} << 30;
};

/// Limits before a peer has proved its identity: a hello and a proof, at most 256 bytes with their
/// headers. A later version's hello may be longer than this version's.
inline constexpr Limits kHelloLimits{128, 0, 0};
inline constexpr Limits kProofLimits{32, 0, 0};

/// Limits for a rank that has proved its identity and has not joined yet.
inline constexpr Limits kJoinLimits{16 * 1024, 0, 0};

/// Limits for a rank that has joined, on its connection to rank 0: directories may be large.
inline constexpr Limits kControlLimits{uint32_t{16} << 20, 0, 0};

/// Each text of an error is truncated to this many bytes, so that every receiver accepts it.
inline constexpr size_t kMostErrorText = 64 * 1024;

inline constexpr size_t kMaxDimensions = 64;

/// Tensors start at multiples of this in a frame's body, and the receive buffer is aligned to it.
inline constexpr size_t kPayloadAlignment = 64;

constexpr uint64_t align_payload(uint64_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

}  // namespace distrain::wire

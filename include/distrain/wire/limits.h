#pragma once

#include <cstddef>
#include <cstdint>

namespace distrain::wire {

/// What is believed of a peer's lengths before anything is allocated for them.
struct Limits {
  uint32_t max_meta_bytes = uint32_t{64} << 20;
  uint32_t max_tensors = 65536;
  uint64_t max_payload_bytes = uint64_t{64} << 30;
};

/// Before the proof a connection is nobody's: a hello and a proof are all that is read from it,
/// with their headers 256 bytes. A later version's hello may be longer than ours.
inline constexpr Limits kHelloLimits{128, 0, 0};
inline constexpr Limits kProofLimits{32, 0, 0};

/// Of a rank that has proved itself and is yet to join.
inline constexpr Limits kJoinLimits{16 * 1024, 0, 0};

/// Of a rank that has joined, on its connection to rank 0: the directory of a large job is large.
inline constexpr Limits kControlLimits{uint32_t{16} << 20, 0, 0};

/// Of an error's texts so many bytes travel: whoever may hear of it has to be able to read it.
inline constexpr size_t kMostErrorText = 64 * 1024;

inline constexpr size_t kMaxDimensions = 64;

/// Tensor bytes start at multiples of this within a frame's body, as the receive buffer does.
inline constexpr size_t kPayloadAlignment = 64;

constexpr uint64_t align_payload(uint64_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

}  // namespace distrain::wire

#pragma once

#include <cstdint>
#include <span>

#define XXH_STATIC_LINKING_ONLY  // declares XXH64_state_t, so that it needs no malloc()
#include <xxhash.h>

namespace distrain::data {

/// Computes the content_hash() of data that arrives in pieces.
class ContentHasher {
 public:
  ContentHasher() { XXH64_reset(&state_, 0); }

  void add(std::span<const uint8_t> bytes) { XXH64_update(&state_, bytes.data(), bytes.size()); }
  /// Returns the hash of the bytes so far.
  uint64_t value() const { return XXH64_digest(&state_); }

 private:
  XXH64_state_t state_;
};

}  // namespace distrain::data

#pragma once

#include <cstdint>
#include <span>

#define XXH_STATIC_LINKING_ONLY  // for a state without a call of malloc()
#include <xxhash.h>

namespace distrain::data {

/// content_hash() of bytes that come piece by piece; where they are cut does not matter.
class ContentHasher {
 public:
  ContentHasher() { XXH64_reset(&state_, 0); }

  void add(std::span<const uint8_t> bytes) { XXH64_update(&state_, bytes.data(), bytes.size()); }
  /// Of the bytes so far.
  uint64_t value() const { return XXH64_digest(&state_); }

 private:
  XXH64_state_t state_;
};

}  // namespace distrain::data

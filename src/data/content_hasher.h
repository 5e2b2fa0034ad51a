#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include <xxhash.h>

namespace distrain::data {

/// content_hash() of bytes that come piece by piece; where they are cut does not matter.
class ContentHasher {
 public:
  ContentHasher();

  void add(std::span<const uint8_t> bytes);
  /// Of the bytes so far.
  uint64_t value() const;

 private:
  struct Free {
    void operator()(XXH64_state_t* state) const { XXH64_freeState(state); }
  };
  std::unique_ptr<XXH64_state_t, Free> state_;
};

}  // namespace distrain::data

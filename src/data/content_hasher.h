#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include <xxhash.h>

namespace distrain::data {

/// content_hash() of bytes that come piece by piece; where they are cut does not matter.
class ContentHasher {
 public:
  explicit ContentHasher(uint64_t seed = 0);

  void add(std::string_view bytes);
  /// Of the bytes so far.
  uint64_t value() const;

 private:
  struct Free {
    void operator()(XXH64_state_t* state) const { XXH64_freeState(state); }
  };
  std::unique_ptr<XXH64_state_t, Free> state_;
};

}  // namespace distrain::data

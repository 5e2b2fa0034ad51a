#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

struct XXH64_state_s;

namespace distrain::store {

/// Returns the XXH64 hash (xxhash.com) of `bytes`. Checkpoints and ranks compare data by it.
uint64_t content_hash(std::string_view bytes);

/// Computes the content_hash() of data that arrives in pieces.
class ContentHasher {
 public:
  ContentHasher();
  ~ContentHasher();

  void add(std::span<const uint8_t> bytes);
  /// Returns the hash of all bytes added so far.
  uint64_t value() const;

 private:
  std::unique_ptr<XXH64_state_s> state_;
};

}  // namespace distrain::store

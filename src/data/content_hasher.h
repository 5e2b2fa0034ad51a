#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace distrain::data {

/// content_hash() of bytes that come piece by piece; where they are cut does not matter.
class ContentHasher {
 public:
  explicit ContentHasher(uint64_t seed = 0);

  void add(std::string_view bytes);
  /// Of the bytes so far.
  uint64_t value() const;

 private:
  using Lanes = std::array<uint64_t, 4>;
  static constexpr size_t kBlock = 32;

  uint64_t seed_;
  // Four lanes, so that the multiplications of one word do not wait for those of the last.
  Lanes lanes_;
  uint64_t length_ = 0;
  std::array<char, kBlock> rest_{};  // the last length_ % kBlock bytes, not in the lanes yet
};

}  // namespace distrain::data

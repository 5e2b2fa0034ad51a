#pragma once

#include <cstdint>

namespace distrain::data {

/// The most that is read of one set of images, decompressed.
inline constexpr uint64_t kMaxImageBytes = uint64_t{8} << 30;

}  // namespace distrain::data

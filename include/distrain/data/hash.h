#pragma once

#include <cstdint>
#include <string_view>

namespace distrain::data {

/// XXH64 (xxhash.com) of `bytes`: ranks on different machines compare what they read by it.
uint64_t content_hash(std::string_view bytes);

}  // namespace distrain::data

#pragma once

#include <cstdint>
#include <string_view>

namespace distrain::data {

/// Returns the XXH64 hash (xxhash.com) of `bytes`. Ranks compare their data by it.
uint64_t content_hash(std::string_view bytes);

}  // namespace distrain::data

#include "distrain/data/hash.h"

#include "content_hasher.h"

namespace distrain::data {

uint64_t content_hash(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

}  // namespace distrain::data

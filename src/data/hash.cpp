#include "distrain/data/hash.h"

#include <new>

#include "content_hasher.h"

namespace distrain::data {

ContentHasher::ContentHasher(uint64_t seed) : state_(XXH64_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH64_reset(state_.get(), seed);
}

void ContentHasher::add(std::string_view bytes) {
  XXH64_update(state_.get(), bytes.data(), bytes.size());
}

uint64_t ContentHasher::value() const { return XXH64_digest(state_.get()); }

uint64_t content_hash(std::string_view bytes, uint64_t seed) {
  return XXH64(bytes.data(), bytes.size(), seed);
}

}  // namespace distrain::data

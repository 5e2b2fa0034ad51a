#include "distrain/data/hash.h"

#include <new>

#include "content_hasher.h"

namespace distrain::data {

ContentHasher::ContentHasher() : state_(XXH64_createState()) {
  if (!state_) throw std::bad_alloc();
  XXH64_reset(state_.get(), 0);
}

void ContentHasher::add(std::span<const uint8_t> bytes) {
  XXH64_update(state_.get(), bytes.data(), bytes.size());
}

uint64_t ContentHasher::value() const { return XXH64_digest(state_.get()); }

uint64_t content_hash(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

}  // namespace distrain::data

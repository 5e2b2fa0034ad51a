#include "distrain/store/hash.h"

#define XXH_STATIC_LINKING_ONLY  // declares XXH64_state_t, so that it needs no malloc()
#include <xxhash.h>

namespace distrain::store {

uint64_t content_hash(std::string_view bytes) { return XXH64(bytes.data(), bytes.size(), 0); }

ContentHasher::ContentHasher() : state_(std::make_unique<XXH64_state_s>()) {
  XXH64_reset(state_.get(), 0);
}
ContentHasher::~ContentHasher() = default;

void ContentHasher::add(std::span<const uint8_t> bytes) {
  XXH64_update(state_.get(), bytes.data(), bytes.size());
}

uint64_t ContentHasher::value() const { return XXH64_digest(state_.get()); }

}  // namespace distrain::store

#include "distrain/data/hash.h"

#include <bit>
#include <cstring>

#include "content_hasher.h"

namespace distrain::data {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9ULL;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;

template <class T>
T load(const char* bytes) {
  static_assert(std::endian::native == std::endian::little);
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

uint64_t round(uint64_t lane, uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

void add_block(const char* block, std::array<uint64_t, 4>& lanes) {
  for (size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] = round(lanes[i], load<uint64_t>(block + 8 * i));
  }
}

uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round(0, lane)) * kPrime1 + kPrime4; }

}  // namespace

ContentHasher::ContentHasher(uint64_t seed)
    : seed_(seed), lanes_{seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1} {}

void ContentHasher::add(std::string_view bytes) {
  const size_t used = length_ % kBlock;
  length_ += bytes.size();
  if (used > 0) {
    const size_t part = bytes.copy(rest_.data() + used, kBlock - used);
    if (used + part < kBlock) return;
    bytes.remove_prefix(part);
    add_block(rest_.data(), lanes_);
  }
  Lanes lanes = lanes_;  // a copy that no char can alias stays in registers
  for (; bytes.size() >= kBlock; bytes.remove_prefix(kBlock)) add_block(bytes.data(), lanes);
  lanes_ = lanes;
  bytes.copy(rest_.data(), kBlock);
}

uint64_t ContentHasher::value() const {
  uint64_t hash = seed_ + kPrime5;
  if (length_ >= kBlock) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const uint64_t lane : lanes_) hash = merge(hash, lane);
  }
  hash += length_;
  const char* at = rest_.data();
  size_t left = length_ % kBlock;
  for (; left >= 8; at += 8, left -= 8) {
    hash = std::rotl(hash ^ round(0, load<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ (load<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
    left -= 4;
  }
  for (; left > 0; ++at, --left) {
    hash = std::rotl(hash ^ (static_cast<uint8_t>(*at) * kPrime5), 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

uint64_t content_hash(std::string_view bytes, uint64_t seed) {
  ContentHasher hasher(seed);
  hasher.add(bytes);
  return hasher.value();
}

}  // namespace distrain::data

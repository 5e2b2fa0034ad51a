#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace distrain::base {

/// Returns the FNV-1a hash of `text`, which is the same in all processes.
inline uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

/// A random generator whose numbers depend only on its key: not on the standard library, the
/// machine or other generators.
///
/// SplitMix64 (Steele, Lea, Flood 2014): the state advances by a constant, the output is a hash of
/// the state. The constructor hashes the key's numbers into the state one after the other.
class Random {
 public:
  explicit Random(std::initializer_list<uint64_t> key) {
    for (const uint64_t part : key) state_ = mix(state_ + kStep + part);
  }

  uint64_t next() { return mix(state_ += kStep); }
  /// Returns a uniform number in [0, bound), without bias (Lemire 2019); `bound` must be above 0.
  uint64_t below(uint64_t bound) {
    Wide product = Wide{next()} * bound;
    if (static_cast<uint64_t>(product) < bound) {
      const uint64_t biased = (0 - bound) % bound;  // 2^64 mod bound
      while (static_cast<uint64_t>(product) < biased) product = Wide{next()} * bound;
    }
    return static_cast<uint64_t>(product >> 64);
  }

  /// Returns a uniform number in [0, 1), a multiple of 2^-53.
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  /// Returns a uniform number in [first, last], both included.
  int64_t between(int64_t first, int64_t last) {
    return first + static_cast<int64_t>(below(static_cast<uint64_t>(last - first) + 1));
  }

 private:
  __extension__ using Wide = unsigned __int128;
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15ULL;

  static uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  uint64_t state_ = 0;
};

}  // namespace distrain::base

#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "distrain/base/error.h"

namespace distrain::wire {

/// Upper bounds on the lengths in a peer's header, checked before memory is allocated.
struct Limits {
  uint32_t max_meta_bytes = uint32_t{64} << 20;
  uint32_t max_tensors = 65536;
  uint64_t max_payload_bytes = uint64_t{64} << 30;
};

/// Limits for the kHello and kProof frames of an untrusted peer: 256 bytes in all with the headers.
/// This version's kHello is shorter than its limit, so that a later version can extend it.
inline constexpr Limits kHelloLimits{128, 0, 0};
inline constexpr Limits kProofLimits{32, 0, 0};

/// Limits for a rank whose kProof was accepted, until the rank has joined.
inline constexpr Limits kJoinLimits{16 * 1024, 0, 0};

/// Limits for a joined rank's connection to rank 0, which may send a directory of many ranks.
inline constexpr Limits kControlLimits{uint32_t{16} << 20, 0, 0};

/// The strings of an error are truncated to this many bytes, so that every receiver accepts them.
inline constexpr size_t kMostErrorText = 64 * 1024;

inline constexpr size_t kMaxDimensions = 64;

/// The alignment in bytes of each tensor in a frame's body, and of receive buffers.
inline constexpr size_t kPayloadAlignment = 64;

constexpr uint64_t align_payload(uint64_t bytes) {
  return (bytes + kPayloadAlignment - 1) / kPayloadAlignment * kPayloadAlignment;
}

using Bytes = std::vector<uint8_t>;

template <class T>
concept Scalar = std::is_arithmetic_v<T> || std::is_enum_v<T>;

static_assert(std::endian::native == std::endian::little,
              "the wire is little-endian and values are copied as they lie in memory");

/// Appends values to a byte vector: little-endian, fixed width, no padding. A string is a u32
/// length and its bytes; a bool is one byte, 0 or 1.
class Writer {
 public:
  explicit Writer(Bytes& out) : out_(out) {}

  template <Scalar T>
  void put(T value) {
    static_assert(sizeof(T) <= 8, "long double has no fixed width");
    const size_t at = out_.size();
    out_.resize(at + sizeof(T));
    std::memcpy(out_.data() + at, &value, sizeof(T));
  }
  void put(std::string_view text) {
    put(static_cast<uint32_t>(text.size()));
    out_.insert(out_.end(), text.begin(), text.end());
  }

 private:
  Bytes& out_;
};

/// Reads values in the format of Writer. Throws `protocol` if the bytes do not fit. Checks each
/// length against the number of bytes left before it allocates memory.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> in) : in_(in) {}

  template <Scalar T>
  T get() {
    if constexpr (std::is_same_v<T, bool>) {
      const uint8_t byte = get<uint8_t>();
      if (byte > 1) fail("a bool that is neither 0 nor 1");
      return byte == 1;
    } else {
      T value;
      std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
      return value;
    }
  }

  std::string_view get_string() {
    const std::span<const uint8_t> bytes = take(get<uint32_t>());
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }

  /// Reads `out.size()` bytes into `out`.
  void copy_to(std::span<uint8_t> out) {
    const std::span<const uint8_t> bytes = take(out.size());
    std::copy(bytes.begin(), bytes.end(), out.begin());
  }

  /// Reads a count. Throws `protocol` if fewer than count * `min_item_bytes` bytes are left.
  uint32_t get_count(size_t min_item_bytes) {
    const uint32_t count = get<uint32_t>();
    if (min_item_bytes != 0 && count > left() / min_item_bytes) fail("a count beyond the message");
    return count;
  }

  size_t left() const { return in_.size(); }
  /// Throws `protocol` if any bytes are left. Call it after the last value.
  void expect_end() const {
    if (!in_.empty()) fail(std::to_string(in_.size()) + " bytes too many");
  }

  [[noreturn]] static void fail(const std::string& what) {
    throw base::Exception(base::ErrorKind::kProtocol, "malformed message: " + what);
  }

 private:
  std::span<const uint8_t> take(size_t bytes) {
    if (bytes > in_.size()) {
      fail(std::to_string(bytes) + " bytes wanted, " + std::to_string(in_.size()) + " left");
    }
    const std::span<const uint8_t> taken = in_.first(bytes);
    in_ = in_.subspan(bytes);
    return taken;
  }

  std::span<const uint8_t> in_;
};

}  // namespace distrain::wire

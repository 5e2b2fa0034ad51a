#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace distrain::base {

/// Copies like memcpy(), but by stores that bypass the caches, if the processor has such stores.
///
/// For large data that this core does not read soon: an ordinary store first fetches the line that
/// it overwrites, which takes up to four times as long as the copy if the line is in no cache.
/// Copies of less than 1 MiB, which may fit in a cache, use ordinary stores.
inline void streaming_copy(uint8_t* to, const uint8_t* from, size_t size) {
#ifdef __SSE2__
  constexpr size_t kLeast = size_t{1} << 20;
  constexpr size_t kLine = 64;
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kLine;
  if (size >= kLeast) {
    std::memcpy(to, from, head);
    size_t at = head;
    for (; at + kLine <= size; at += kLine) {
      for (size_t part = 0; part < kLine; part += sizeof(__m128i)) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + part),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + part)));
      }
    }
    _mm_sfence();
    to += at;
    from += at;
    size -= at;
  }
#endif
  if (size > 0) std::memcpy(to, from, size);
}

}  // namespace distrain::base
